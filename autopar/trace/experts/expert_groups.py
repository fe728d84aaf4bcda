"""Routers that choose a few groups of experts first: on how many groups a token's experts are.

The router scores groups of neighboring experts, marks the best ones in a mask, fills the scores of all other experts,
and takes the best of what is left.  This is followed backwards from the numbers of the chosen experts to the marks; the
ops from there on are run, to see which experts a mark leaves.  Routing of another form counts as unlimited: nothing
that is computed depends on this, only what sending tokens is expected to cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from autopar.program import Op
from autopar.trace.evaluation import run_op
from autopar.trace.experts.row_order import with_sizes
from autopar.trace.graph import Graph

__all__ = ["UNLIMITED", "group_limit"]

UNLIMITED = (1, 1)
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_ON_MARKS = (
    *_VIEWS, "aten.unsqueeze.default", "aten.expand.default", "aten._to_copy.default", "aten.bitwise_not.default",
    "aten.logical_not.default",
)  # fmt: skip
_MOST_TOKENS = 1 << 12  # to run ops on as they are; more than any number of experts, so that 1 can replace this size


def group_limit(graph: Graph, ids: str, num_experts: int) -> tuple[int, int]:
    """(number of groups, on how many of them a token has experts at most); `UNLIMITED` if the graph shows no limit.

    Args:
        graph: with the router's ops.
        ids: the value with the expert of each row.
        num_experts: how many; each group has equally many neighbors.
    """
    best = _producer(graph, _back(graph, ids, _VIEWS)[0], ("aten.topk.default",))
    filled = best and _producer(graph, _back(graph, best.operands[0], _VIEWS)[0], ("aten.masked_fill.Scalar",))
    # Not chosen: what is minus infinity, or 0 among scores that are probabilities.
    if not best or not filled or graph.types[best.operands[0]].shape[-1] != num_experts or not _is_low(filled):
        return UNLIMITED
    name, path = _back(graph, filled.operands[1], _ON_MARKS)
    marks, marking = graph.types[name], _producer(graph, name, ("aten.scatter.value",))
    if marking is None or len(marks.shape) != 2 or marking.args[1] not in (1, -1) or num_experts % marks.shape[1]:
        return UNLIMITED
    start = graph.producers.get(marking.operands[0])
    groups, chosen = marks.shape[1], graph.types[marking.operands[1]].shape[1]
    if start is None or _producer(graph, marking.operands[1], ("aten.topk.default",)) is None or chosen >= groups:
        return UNLIMITED
    left = _left(graph, (start, marking, *reversed(path), filled), marks.shape)
    own = torch.eye(groups, dtype=torch.bool).repeat_interleave(num_experts // groups, 1)
    return (groups, chosen) if left is not None and torch.equal(left, own) else UNLIMITED


def _producer(graph: Graph, name: str, targets: Collection[str]) -> Op | None:
    """The op that makes the value, if it is one of `targets`."""
    op = graph.producers.get(name)
    return op if op is not None and op.target in targets else None


def _back(graph: Graph, name: str, targets: Collection[str]) -> tuple[str, list[Op]]:
    """The value before all ops of these `targets`, and the ops, the last one first."""
    path: list[Op] = []
    while (op := _producer(graph, name, targets)) is not None:
        path.append(op)
        name = op.operands[0]
    return name, path


def _is_low(filled: Op) -> bool:
    return isinstance(filled.args[2], int | float) and filled.args[2] <= 0


def _left(graph: Graph, ops: Sequence[Op], shape: Sequence[int]) -> Tensor | None:
    """[groups, experts]: whether an expert can be chosen if one group is marked; None if the ops can't be run.

    Args:
        graph: with the types of what the ops read.
        ops: what the marks begin with, marking, what happens to the marks, and filling scores by them.
        shape: of the marks: tokens, groups.
    """
    tokens, groups = shape
    small = {tokens: 1} if tokens > _MOST_TOKENS else {}
    read = {name for op in (ops[0], ops[-1]) for name in op.operands} - {ops[-1].operands[1]}
    sizes = {name: [small.get(size, size) for size in graph.types[name].shape] for name in read}
    rows: list[Tensor] = []
    for group in range(groups):
        # What the marks begin with may have the shape of a value, but must not depend on it.
        values = {name: torch.full(sizes[name], math.nan) for name in ops[0].operands}
        values[ops[1].operands[1]] = torch.full((small.get(tokens, tokens), 1), group)
        values[ops[-1].operands[0]] = torch.ones(sizes[ops[-1].operands[0]])
        try:
            for op in ops:
                values[op.results[0]] = run_op(with_sizes(op, small), values)[0]
        except (RuntimeError, IndexError, ValueError, TypeError, KeyError):
            return None
        rows.append(values[ops[-1].results[0]][0].flatten() > 0)
    return torch.stack(rows)
