"""In which order the elements of a tensor lie in memory: what tells a view from a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.program import Op

__all__ = ["Order", "in_order", "result_order"]


@dataclass(frozen=True)
class Order:
    """Of each dim of a tensor, how many elements further on in memory its next one lies; 0: the same one again."""

    strides: tuple[int, ...]


# Views that name the same elements in the same order; the others are views where their operand allows it.
_RENAME = frozenset({"view", "_unsafe_view", "unsqueeze", "squeeze", "unflatten", "reshape", "flatten", "contiguous"})
_SAME = frozenset({"alias", "detach", "lift_fresh_copy"})
_EXCHANGE = frozenset({"transpose", "permute", "t"})
# Ops that write their result as their first operand lies, if that is as large.
_FOLLOW = frozenset(
    ["add", "sub", "mul", "div", "neg", "pow", "silu", "gelu", "relu", "tanh", "sigmoid", "dropout", "to", "_to_copy",
     "clone"]
)  # fmt: skip


def in_order(shape: Sequence[int]) -> Order:
    """The order of a tensor that was made anew."""
    return Order(tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


def result_order(op: Op, shape: tuple[int, ...], order: Order, result: tuple[int, ...]) -> tuple[bool, Order]:
    """Whether the (first) result is a view of the first operand, and its order.

    Args:
        op: what makes it.
        shape: of the first operand, as one device has it.
        order: of the first operand.
        result: the result's shape, as one device has it.
    """
    name = op.target.split(".")[1] if "." in op.target else op.target
    if not op.is_view:
        # torch's fast attention kernels write their result as the query lies; so do elementwise ones.
        follows = shape == result and (name in _FOLLOW or "attention" in name)
        return False, _packed(shape, order) if follows and not _asks_for_order(op) else in_order(result)
    if name in _SAME:
        return True, order
    if name in _EXCHANGE:
        return True, Order(tuple(order.strides[dim] for dim in _exchanged(name, op, len(shape))))
    if name == "expand":
        before = (*(1,) * (len(result) - len(shape)), *shape)
        strides = (*(0,) * (len(result) - len(shape)), *order.strides)
        return True, Order(tuple(0 if old != new else s for old, new, s in zip(before, result, strides, strict=True)))
    if name in _RENAME:
        strides = _renamed(shape, order.strides, result)
        return (False, in_order(result)) if strides is None else (True, Order(strides))
    if len(shape) == len(result):  # a part of it
        return True, order
    return True, in_order(result)


def _asks_for_order(op: Op) -> bool:
    return any(key == "memory_format" and "preserve" not in str(value) for key, value in op.kwargs)


def _packed(shape: tuple[int, ...], order: Order) -> Order:
    """A tensor of its own whose dims lie in the same order."""
    strides = [0] * len(shape)
    step = 1
    # Dims of one element, and such that stand for several, lie as their names say.
    for dim in sorted(range(len(shape)), key=lambda dim: (order.strides[dim], -dim)):
        strides[dim] = step
        step *= shape[dim]
    return Order(tuple(strides))


def _exchanged(name: str, op: Op, rank: int) -> list[int]:
    """For each dim of the result which one of the operand it is."""
    dims = list(range(rank))
    if name == "permute":
        given = op.args[1] if isinstance(op.args[1], tuple) else ()
        dims = [int(dim) % rank for dim in given if isinstance(dim, int)]
    elif rank > 1:
        named = [int(dim) % rank for dim in op.args[1:3] if isinstance(dim, int)] if name == "transpose" else []
        first, second = named or (0, 1)
        dims[first], dims[second] = dims[second], dims[first]
    return dims


def _renamed(before: tuple[int, ...], strides: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of the same elements under another shape; None if that takes a copy."""
    if 0 in after:
        return in_order(after).strides
    # Neighbours through which one walks at an even pace are one run: how many elements, how far apart.
    runs: list[tuple[int, int]] = []
    for size, stride in zip(before, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = runs[-1][0] * size, stride
        else:
            runs.append((size, stride))
    found: list[int] = []
    left, stride = runs.pop() if runs else (1, 1)
    for size in reversed(after):
        if size > 1 and left == 1 and runs:
            left, stride = runs.pop()
        if left % size:
            return None
        found.append(stride)
        left //= size
        stride *= size
    return tuple(reversed(found)) if left == 1 and not runs else None
