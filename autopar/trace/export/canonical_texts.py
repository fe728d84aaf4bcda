"""A functional graph as text that says what is computed, not in which order it was traced nor what is never read.

Rows of a table that were written just before are what was written, ``self.table[:n] = rows``, then ``self.table[:n]``,
if all calls write the same: not if they follow from inputs or from what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec

__all__ = ["canonical_text"]


def canonical_text(graph: fx.Graph, inputs: Sequence[InputSpec]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A line for each op that results follow from, by number, and the targets of the `inputs` among them, in order.

    Graphs whose texts are equal compute the same, if what these targets stand for is the same.
    """
    same = _same_values(graph, {spec.arg.name for spec in inputs if spec.kind is InputKind.USER_INPUT})
    targets = {spec.arg.name: str(spec.target or spec.arg.name) for spec in inputs}
    numbers: dict[fx.Node, int] = {}
    lines: list[str] = []
    read: list[str] = []
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting[-1]
        missing = [same[each] for each in node.all_input_nodes if same[each] not in numbers]
        if node in numbers or missing:
            waiting.extend(reversed(missing))
            if not missing:
                waiting.pop()
            continue
        waiting.pop()
        if node.op == "placeholder":
            read.append(targets.get(str(node.name), str(node.name)))
        operands: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda each: f"%{numbers[same[each]]}")
        what = "" if node.op in ("placeholder", "output") else str(node.target)
        numbers[node] = len(numbers)
        lines.append(f"{node.op} {what} {operands}")
    return tuple(lines), tuple(read)


def _same_values(graph: fx.Graph, given: Set[str]) -> dict[fx.Node, fx.Node]:
    """For each node the first that has its values in every call with other tensors in the inputs `given`."""
    same: dict[fx.Node, fx.Node] = {}
    varying: set[fx.Node] = set()
    for node in graph.nodes:
        operands = [same[each] for each in node.all_input_nodes]
        is_trained = node.op == "placeholder" and getattr(node.meta.get("val"), "requires_grad", False)
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.name in given or is_trained or is_random or not varying.isdisjoint(operands):
            varying.add(node)
        source = _source(node, same)
        same[node] = node if source is None or source in varying else source
    return same


def _source(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> fx.Node | None:
    """Which of the nodes before has the values of this one, if not its gradient."""
    name = str(node.target)
    if name in ("aten.detach.default", "aten.alias.default"):
        return same[cast("fx.Node", node.args[0])]
    if name == "aten.copy.default":
        written = same[cast("fx.Node", node.args[1])]
        return written if _form(written) == _form(node) else None
    if name == "aten.slice.Tensor":
        table = same[cast("fx.Node", node.args[0])]
        is_written = str(table.target) == "aten.slice_scatter.default" and table.args[2:] == node.args[1:]
        return same[cast("fx.Node", table.args[1])] if is_written and not (table.kwargs or node.kwargs) else None
    return None


def _form(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else node
