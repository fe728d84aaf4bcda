"""A functional graph as text that says what is computed, not in which order it was traced nor what is never read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch.export.graph_signature import InputSpec

__all__ = ["canonical_text"]


def canonical_text(graph: fx.Graph, inputs: Sequence[InputSpec]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A line for each op that results follow from, by number, and the targets of the `inputs` among them, in order.

    Graphs whose texts are equal compute the same, if what these targets stand for is the same.
    """
    targets = {spec.arg.name: str(spec.target or spec.arg.name) for spec in inputs}
    numbers: dict[fx.Node, int] = {}
    lines: list[str] = []
    read: list[str] = []
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting[-1]
        missing = [each for each in node.all_input_nodes if each not in numbers]
        if node in numbers or missing:
            waiting.extend(reversed(missing))
            if not missing:
                waiting.pop()
            continue
        waiting.pop()
        if node.op == "placeholder":
            read.append(targets.get(str(node.name), str(node.name)))
        operands: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda each: f"%{numbers[each]}")
        what = "" if node.op in ("placeholder", "output") else str(node.target)
        numbers[node] = len(numbers)
        lines.append(f"{node.op} {what} {operands}")
    return tuple(lines), tuple(read)
