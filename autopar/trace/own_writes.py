"""Groups of ops that write to a tensor which one of them makes: taken together, they write to nothing.

An example is an inverse permutation, ``inverse = empty_like(order); inverse[order] = arange(n)``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.trace import torch_internals, torch_recording

__all__ = ["group_writes"]


def group_writes(ops: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]] | None:
    """By each op that belongs to such a group, the group in order; None if an op writes to something else.

    A group has the op that makes the tensor, and what writes to it or makes views of it until the last write.  Nobody
    else may read it before: that op could return a view as well.
    """
    groups: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for op in ops:
        if op in groups or not torch_internals.writes(op.target):
            continue
        maker = _maker(op)
        if maker is None or maker in groups:
            return None
        group = _group(ops, maker)
        if op not in group or any(each in groups for each in group):
            return None
        groups |= dict.fromkeys(group, group)
    return groups


def _maker(op: fx.Node) -> fx.Node | None:
    """The op whose new tensor this one shares, or None if that isn't known."""
    while shared := torch_internals.shared(op.target):
        source = op.args[shared[0]] if len(shared) == 1 and shared[0] < len(op.args) else None
        if not isinstance(source, fx.Node) or not torch_internals.is_plain_op(source.target):
            return None
        op = source
    return None if torch_recording.is_composite(str(op.target)) else op


def _group(ops: Sequence[fx.Node], maker: fx.Node) -> tuple[fx.Node, ...]:
    """The ops that share what `maker` makes, until the last write; empty if others read it before that."""
    found, read_behind = [maker], list[int]()
    for op in ops[ops.index(maker) + 1 :]:
        if not set(found).isdisjoint(op.all_input_nodes):
            shares = any(op.args[at : at + 1] and op.args[at] in found for at in torch_internals.shared(op.target))
            if shares and not isinstance(op.meta["val"], list | tuple):
                found.append(op)
            else:
                read_behind.append(len(found))
    last = max((place for place, op in enumerate(found) if torch_internals.writes(op.target)), default=0)
    return () if any(count <= last for count in read_behind) else tuple(found[: last + 1])
