"""What leads from inputs to a tensor of the trace under way, as a computation that later calls run again."""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem
from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.trace import torch_internals
from autopar.trace.input_computations import Computation, Operand, Step, map_arguments
from autopar.trace.torch_recording import Recorder

__all__ = ["computation_of"]


def computation_of(recording: Recorder, x: Tensor, places: Mapping[fx.Node, int]) -> Computation | None:
    """What leads from inputs, with their `places`, to a tensor of the trace under way.

    None if it follows from anything else as well, such as parameters or random numbers, if an input is written to, or
    if floats are rounded.  A computation without inputs is one of constants, such as a mask that forward makes itself.
    """
    last = recording.node_of(x)
    if last is None:
        return None
    needed = _behind(recording.graph, last)
    own = [node for node in needed if node in places]
    results: dict[fx.Node, Any] = {node: Operand(index) for index, node in enumerate(own)}
    steps: list[Step] = []
    memory = {key for node in own for key in _memory_of(node)}

    def given(arg: Any) -> Any:
        return results[arg] if isinstance(arg, fx.Node) else arg

    for node in needed:
        if node in results:
            continue
        if node.op == "get_attr":
            constant = recording.constant_of(node)
            if constant is None:
                return None
            results[node] = constant
            continue
        if not _can_be_repeated(node) or _is_rounding(node) or not memory.isdisjoint(_written_by(node)):
            return None
        target = "getitem" if node.target is getitem else str(node.target)
        kwargs = tuple((name, map_arguments(arg, given)) for name, arg in node.kwargs.items())
        results[node] = Operand(len(own) + len(steps))
        steps.append(Step(target, map_arguments(node.args, given), kwargs))
    if not own and not steps:
        return None
    if steps and results[last] != Operand(len(own) + len(steps) - 1):  # written to since: the result comes last
        steps.append(Step("aten.alias.default", (results[last],)))
    return Computation(tuple(places[node] for node in own), tuple(steps))


def _can_be_repeated(node: fx.Node) -> bool:
    """Whether it is an op that gives the same with the same operands."""
    if node.op != "call_function":
        return False
    target = cast("Any", node.target)
    is_plain = torch_internals.is_plain_op(target) and torch.Tag.nondeterministic_seeded not in target.tags
    return target is getitem or is_plain


def _is_rounding(node: fx.Node) -> bool:
    """Whether it makes integers of floats, which are others in every batch; to compare them gives truth values."""
    kinds = {x.dtype for x in _tensors(node)}
    has_integers = any(not kind.is_floating_point and kind != torch.bool for kind in kinds)
    return has_integers and any(x.is_floating_point() for each in node.all_input_nodes for x in _tensors(each))


def _tensors(node: fx.Node) -> list[Tensor]:
    leaves, _ = torch_internals.flatten(node.meta.get("val"))
    return [x for x in leaves if isinstance(x, Tensor)]


def _behind(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    """The nodes that the value of `last` follows from now, in order: with those that write to what these read."""
    needed: set[fx.Node] = set()
    memory: set[int] = set()
    writes = [node for node in graph.nodes if _written_by(node)]
    waiting = [last]
    while waiting:
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                memory |= _memory_of(node)
                waiting.extend(node.all_input_nodes)
        waiting = [node for node in writes if node not in needed and not memory.isdisjoint(_written_by(node))]
    return [node for node in graph.nodes if node in needed]


def _memory_of(node: fx.Node) -> set[int]:
    return {torch_internals.storage_key(x) for x in _tensors(node)}


def _written_by(node: fx.Node) -> set[int]:
    """The memory of what an op writes to."""
    target = cast("Any", node.target)
    if node.op != "call_function" or not torch_internals.is_plain_op(target) or not torch_internals.writes(target):
        return set()
    written = [node.args[at] for at in torch_internals.shared(target) if at < len(node.args)]
    return {key for arg in written if isinstance(arg, fx.Node) for key in _memory_of(arg)}
