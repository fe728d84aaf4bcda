"""The values that gradients flow into."""

from __future__ import annotations

from autopar.ops import family_of
from autopar.trace.graph import Graph

__all__ = ["differentiable"]


def differentiable(graph: Graph) -> frozenset[str]:
    """The floating values that depend on something trainable."""
    result = set(graph.trainable)
    for op in graph.ops:
        if any(name in result for name in op.operands):
            results = op.results[: family_of(op.target).num_differentiable]
            result.update(name for name in results if graph.types[name].is_floating)
    return frozenset(result)
