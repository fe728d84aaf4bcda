"""In which order the elements of a tensor lie in memory: what tells a view from a copy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.program import Op

__all__ = ["Order", "in_order", "result_order"]


@dataclass(frozen=True)
class Order:
    """A tensor's dims from the one with the largest stride to that with the smallest.

    One that is not dense is a slice of a larger tensor, or has elements that stand for several.
    """

    dims: tuple[int, ...]
    is_dense: bool = True


# Views that name the same elements in the same order; the others are views where their operand allows it.
_RENAME = frozenset({"view", "_unsafe_view", "unsqueeze", "squeeze", "unflatten", "reshape", "flatten", "contiguous"})
_SAME = frozenset({"alias", "detach", "lift_fresh_copy"})
_EXCHANGE = frozenset({"transpose", "permute", "t"})
# Ops that write their result as their first operand lies, if that is as large.
_FOLLOW = frozenset(
    ["add", "sub", "mul", "div", "neg", "pow", "silu", "gelu", "relu", "tanh", "sigmoid", "dropout", "to", "_to_copy"]
)


def in_order(shape: tuple[int, ...]) -> Order:
    """The order of a tensor that was made anew."""
    return Order(tuple(range(len(shape))))


def result_order(op: Op, shape: tuple[int, ...], order: Order, result: tuple[int, ...]) -> tuple[bool, Order]:
    """Whether the (first) result is a view of the first operand, and its order.

    Args:
        op: what makes it.
        shape: of the first operand.
        order: of the first operand.
        result: the result's shape.
    """
    name = op.target.split(".")[1] if "." in op.target else op.target
    if not op.is_view:
        # torch's fast attention kernels write their result as the query lies; so do elementwise ones.
        follows = shape == result and (name in _FOLLOW or "attention" in name)
        return False, Order(order.dims) if follows else in_order(result)
    if name in _SAME:
        return True, order
    if name in _EXCHANGE:
        return True, replace(order, dims=_exchanged(name, op, order.dims))
    if name not in _RENAME:
        same_rank = len(shape) == len(result)
        return True, Order(order.dims if same_rank else in_order(result).dims, is_dense=False)
    if order == in_order(shape):
        return True, in_order(result)
    groups = _split_groups(shape, result)
    if groups is None:
        return False, in_order(result)
    return True, replace(order, dims=tuple(new for dim in order.dims for new in groups[dim]))


def _exchanged(name: str, op: Op, order: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(order)
    dims = list(range(rank))
    if name == "permute":
        given = op.args[1] if isinstance(op.args[1], tuple) else ()
        dims = [int(dim) % rank for dim in given if isinstance(dim, int)]
    elif rank > 1:
        named = [int(dim) % rank for dim in op.args[1:3] if isinstance(dim, int)] if name == "transpose" else []
        first, second = named or (0, 1)
        dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims.index(dim) for dim in order)


def _split_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[list[int]] | None:
    """For each dim of `before` the consecutive dims of `after` that it becomes; None if dims are joined."""
    groups: list[list[int]] = []
    at = 0
    for size in before:
        group: list[int] = []
        product = 1
        while product < size and at < len(after):
            product *= after[at]
            group.append(at)
            at += 1
        if product != size:
            return None
        groups.append(group)
    if any(size != 1 for size in after[at:]):
        return None
    if groups:
        groups[-1].extend(range(at, len(after)))
    return groups
