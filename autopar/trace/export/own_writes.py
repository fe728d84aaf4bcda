"""Groups of ops that write to a tensor which one of them makes: taken together, they write to nothing.

An example is an inverse permutation, ``inverse = empty_like(order); inverse[order] = arange(n)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem

import torch
from torch import fx

from autopar.trace.compat import torch_internals, torch_recording

__all__ = ["copy_written_results", "group_writes"]


def copy_written_results(graph: fx.Graph, is_op: Callable[[fx.Node], bool]) -> None:
    """Let writes to one of several results that an op makes (``values, ids = topk(x); values /= values.sum()``) be
    writes to a copy of it, which is a group's maker: all that reads the result reads the copy.

    Results of composite ops may share memory with others, and stay.
    """
    for op in list(filter(is_op, graph.nodes)):
        result = _source(op) if torch_internals.writes(op.target) else None
        if result is None or result.target is not getitem:
            continue
        maker = result.args[0]
        assert isinstance(maker, fx.Node)
        is_fresh = torch_internals.is_plain_op(maker.target) and not torch_internals.shared(maker.target)
        if not is_fresh or torch_recording.is_composite(str(maker.target)):
            continue
        with graph.inserting_after(result):
            copy = graph.call_function(torch.ops.aten.clone.default, (result,))
        copy.meta = dict(result.meta)
        result.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)


def group_writes(ops: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]] | None:
    """By each op that belongs to such a group, the group in order; None if an op writes to something else.

    A group has the op that makes the tensor, and all that depends on it until the last write: that may be a view as
    well, or be read by a write.
    """
    groups: dict[fx.Node, tuple[fx.Node, ...]] = {}
    places = {op: place for place, op in enumerate(ops)}
    for op in ops:
        if op in groups or not torch_internals.writes(op.target):
            continue
        maker = _maker(op)
        if maker is None or maker in groups:
            return None
        group = _group(places, maker)
        if op not in group or any(each in groups for each in group):
            return None
        groups |= dict.fromkeys(group, group)
    return groups


def _maker(op: fx.Node) -> fx.Node | None:
    """The op whose new tensor this one shares, or None if that isn't known."""
    source = _source(op)
    return source if source is not None and torch_internals.is_plain_op(source.target) else None


def _source(op: fx.Node) -> fx.Node | None:
    """The first node, back from `op`, that shares memory with no operand, as it says; None if that isn't known."""
    while torch_internals.is_plain_op(op.target) and (shared := torch_internals.shared(op.target)):
        source = op.args[shared[0]] if len(shared) == 1 and shared[0] < len(op.args) else None
        if not isinstance(source, fx.Node):
            return None
        op = source
    return op


def _group(places: Mapping[fx.Node, int], maker: fx.Node) -> tuple[fx.Node, ...]:
    """`maker`, and all that depends on what it makes until the last write to that; empty if that isn't known."""

    def shares(op: fx.Node, source: fx.Node) -> bool:
        return any(op.args[at : at + 1] == (source,) for at in torch_internals.shared(op.target))

    sharing = _reached(places, maker, shares)
    last = max([places[op] for op in sharing if torch_internals.writes(op.target)], default=places[maker])
    depends = _reached(places, maker, lambda op, _: places[op] <= last)
    group = tuple(sorted(depends, key=places.__getitem__))
    # Who reads one of several results names another node.
    return () if any(isinstance(op.meta["val"], list | tuple) for op in group) else group


def _reached(
    places: Mapping[fx.Node, int], start: fx.Node, is_reached: Callable[[fx.Node, fx.Node], bool]
) -> set[fx.Node]:
    """`start`, and the ops that read what is reached where ``is_reached(op, what it reads)``."""
    reached, pending = {start}, [start]
    while pending:
        source = pending.pop()
        for op in source.users:
            if op in places and op not in reached and is_reached(op, source):
                reached.add(op)
                pending.append(op)
    return reached
