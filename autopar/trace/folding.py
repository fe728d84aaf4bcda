"""Folding: what depends on no input, no parameter and no updated buffer is computed once, here, on the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from autopar.trace.constants import Evaluator, constant_cone
from autopar.trace.graph import Graph, rename

__all__ = ["fold_constants", "share_equal_constants"]


def fold_constants(graph: Graph) -> Graph:
    """Replace what is known by constants."""
    cone = constant_cone(graph)
    roots: dict[str, None] = {}
    for op in graph.ops:
        if not cone.issuperset(op.results):
            roots.update((name, None) for name in op.operands if name in cone)
    roots.update((name, None) for name in (*graph.outputs, *graph.updates.values()) if name in cone)
    evaluator = Evaluator(graph)
    folded = {name: evaluator.value(name) for name in roots}
    notes = _folded_state(graph, cone)
    return replace(
        graph,
        ops=tuple(op for op in graph.ops if not cone.issuperset(op.results) or not op.results),
        roles={**graph.roles, **dict.fromkeys(folded, "constant")},
        constants={**graph.constants, **folded},
        notes=graph.notes + tuple(notes),
    )


def _folded_state(graph: Graph, cone: frozenset[str]) -> Iterator[str]:
    read = {n for op in graph.ops if cone.issuperset(op.results) for n in op.operands if n in graph.buffers}
    for name in sorted(read):
        if graph.buffers[name].is_floating_point():
            yield (
                f"buffer {graph.parameters[name]} was read while tracing: what is computed from it alone "
                f"keeps its "
                "present contents"
            )


def share_equal_constants(graph: Graph) -> Graph:
    """Keep one of several constants that are equal."""
    first: dict[object, str] = {}
    same: dict[str, str] = {}
    for name, tensor in graph.constants.items():
        owner = first.setdefault(_content_key(tensor), name)
        if owner != name:
            same[name] = owner
    return rename(graph, same)


def _content_key(tensor: Tensor) -> object:
    if tensor.device.type == "meta":
        return id(tensor)
    # Dims that only repeat (stride 0) are hashed once.
    core = tensor[tuple(slice(0, 1) if s == 0 else slice(None) for s in tensor.stride())]
    core = core.clone(memory_format=torch.contiguous_format).reshape(-1)
    digest = hashlib.sha256(bytes(core.view(torch.uint8).numpy()) if core.numel() else b"")
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), digest.hexdigest()
