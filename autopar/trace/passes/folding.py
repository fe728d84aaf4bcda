"""Folding: what is computed from constants alone is computed here, on the CPU; from buffers as well, once a step."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from autopar.program import Op, Ref, TensorType
from autopar.trace.graph import Graph, Names, rename
from autopar.trace.passes.broadcasting import expand_at_readers
from autopar.trace.passes.cleanup import merge_equal_ops
from autopar.trace.passes.constants import Evaluator, constant_cone, step_cone

__all__ = ["copy_what_leaves", "fold_constants", "hoist_buffer_ops", "share_equal_constants"]


# Entries of a tensor of one number that is created where it is read: as a constant it would be there throughout a step,
# 1 GB for the first state of a scan over 512 rows.  Smaller ones cost less than a kernel for each microbatch.
_CREATED_ENTRIES = 1 << 20


def fold_constants(graph: Graph) -> Graph:
    """Replace what is known by constants, but for expansions at the end and large tensors of one number, which are
    computed where they are read.
    """
    graph, expansions = expand_at_readers(_merge_constants(graph))
    evaluator = Evaluator(graph)
    graph, created = _create_at_readers(graph, evaluator)
    cone = constant_cone(graph) - expansions - created
    roots: dict[str, None] = {}
    for op in graph.ops:
        if not cone.issuperset(op.results):
            roots.update((name, None) for name in op.operands if name in cone)
    roots.update((name, None) for name in (*graph.outputs, *graph.updates.values()) if name in cone)
    folded = {name: evaluator.folded(name) for name in roots}
    return replace(
        graph,
        ops=tuple(op for op in graph.ops if not cone.issuperset(op.results) or not op.results),
        roles={**graph.roles, **dict.fromkeys(folded, "constant")},
        constants={**graph.constants, **folded},
    )


def _merge_constants(graph: Graph) -> Graph:
    """Compute once what layers make of constants alone."""
    cone = constant_cone(graph)
    return _merge_among(graph, {op.name for op in graph.ops if cone.issuperset(op.results)})


def _merge_among(graph: Graph, names: Collection[str]) -> Graph:
    """Compute once what several ops of these names compute; all others stay."""
    groups = {op.name: 0 if op.name in names else place for place, op in enumerate(graph.ops, start=1)}
    return merge_equal_ops(graph, within=groups)


def _create_at_readers(graph: Graph, evaluator: Evaluator) -> tuple[Graph, frozenset[str]]:
    """Let ops that are not constant read large tensors of one number from ops of their own; also the names of these.

    They split as what is computed with them, in microbatches too.
    """
    cone, names = constant_cone(graph), Names(graph)
    types: dict[str, TensorType] = {}

    def number_of(name: str) -> bool | float | None:
        is_large = name in cone and graph.types[name].num_elements >= _CREATED_ENTRIES
        if not is_large or "complex" in graph.types[name].dtype:
            return None
        return evaluator.single_number(name)

    def step(op: Op) -> Iterable[Op] | None:
        if cone.issuperset(op.results):
            return None
        own: dict[str, Op] = {}
        for name in dict.fromkeys(op.operands):
            number = number_of(name)
            if number is not None:
                kind, fresh = graph.types[name], names.fresh(name)
                types[fresh] = kind
                args, dtype = (kind.shape, number), (("dtype", f"torch.{kind.dtype}"),)
                own[name] = Op(fresh, "aten.full.default", args, dtype, (fresh,), source=op.source, module=op.module)
        return [*own.values(), op.reading({name: each.name for name, each in own.items()})] if own else None

    return graph.rewrite(step).with_types(types), frozenset(types)


def hoist_buffer_ops(graph: Graph) -> Graph:
    """Take what is computed from buffers alone out of the layers, which then read its results as constants.

    What leaves the program stays, to be put out by a layer, unless others of them read it: then a layer puts out a copy
    (`copy_what_leaves`).
    """
    cone = step_cone(graph)
    read = {name for op in _within(cone, graph) for name in op.operands}
    left = graph.read_at_end | constant_cone(graph)  # `fold_constants` leaves expansions to their readers
    hoistable = {op.name for op in _within(cone - (left - read), graph)}
    merged = _merge_among(graph, hoistable)
    hoisted = tuple(op for op in merged.ops if op.name in hoistable)
    results = (name for op in hoisted for name in op.results)
    return replace(
        merged,
        ops=tuple(op for op in merged.ops if op.name not in hoistable),
        hoisted=hoisted,
        roles={**merged.roles, **dict.fromkeys(results, "constant")},
    )


def _within(cone: frozenset[str], graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.results and cone.issuperset(op.results)]


def copy_what_leaves(graph: Graph) -> Graph:
    """Have an op put out each constant, parameter and buffer that the model returns, or gives a buffer."""
    state = {"constant", "parameter", "buffer"}
    leaving = [name for name in dict.fromkeys(graph.outputs) if graph.roles.get(name) in state]
    leaving += [name for name in dict.fromkeys(graph.updates.values()) if graph.roles.get(name) in state]
    names = Names(graph)
    copies = {name: names.fresh(f"{name}_copy") for name in leaving}
    ops = [Op(copy, "aten.clone.default", (Ref(name),), (), (copy,)) for name, copy in copies.items()]
    return replace(
        graph,
        ops=(*graph.ops, *ops),
        types={**graph.types, **{copy: graph.types[name] for name, copy in copies.items()}},
        outputs=tuple(copies.get(name, name) for name in graph.outputs),
        updates={buffer: copies.get(name, name) for buffer, name in graph.updates.items()},
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
