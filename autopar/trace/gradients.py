"""Which values a gradient flows into."""

from __future__ import annotations

from autopar.trace.graph import Graph

__all__ = ["differentiable"]

# Ops whose floating results carry no gradient although an operand may: they read a shape only, or stop it on
# purpose.
_STOPS = frozenset({
    "aten.detach", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.rand_like",
    "aten.randn_like", "aten.randint_like", "aten.new_zeros", "aten.new_ones", "aten.new_full",
    "aten.new_empty",
    "aten.bernoulli", "aten.exponential", "aten.normal_functional", "aten.uniform",
    "autopar.cross_entropy_denominator",
})  # fmt: skip
# Of these only the first result carries one; the others are statistics, new contents of buffers, or masks.
_FIRST_ONLY = frozenset({
    "autopar.batch_norm", "aten._native_batch_norm_legit_functional", "aten.native_dropout",
    "aten._native_batch_norm_legit",
})  # fmt: skip


def differentiable(graph: Graph) -> frozenset[str]:
    """The floating values that depend on something trainable."""
    found = set(graph.trainable)
    for op in graph.ops:
        target = op.target if op.target.startswith("autopar.") else op.target.rsplit(".", 1)[0]
        if target in _STOPS or not any(name in found for name in op.operands):
            continue
        results = op.results[:1] if target in _FIRST_ONLY else op.results
        found.update(name for name in results if graph.types[name].is_floating)
    return frozenset(found)
