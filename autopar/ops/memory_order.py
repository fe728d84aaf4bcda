"""The order of a tensor's elements in memory, which decides whether a reshape is a view or a copy.

A `PlaceResult` returns for one call whether the (first) result is a view of the first operand, and the result's order.
It gets the op, the operand's local shape and order, and the result's local shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from autopar.program import Op

__all__ = [
    "Order",
    "PlaceResult",
    "expanded",
    "followed",
    "has_even_rows",
    "in_order",
    "new",
    "part",
    "permuted",
    "regrouped",
    "same",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Order:
    """The stride of each dim of a tensor, in elements; 0: expanded."""

    strides: tuple[int, ...]


PlaceResult = Callable[[Op, Shape, Order, Shape], tuple[bool, Order]]


@lru_cache(maxsize=1 << 14)
def in_order(shape: Shape) -> Order:
    """The order of a contiguous tensor."""
    return Order(tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


def has_even_rows(shape: Shape, order: Order) -> bool:
    """Whether all dims but the last can be viewed as one."""
    return _regrouped_strides(shape, order.strides, (math.prod(shape[:-1]), shape[-1])) is not None


def new(op: Op, shape: Shape, order: Order, result: Shape) -> tuple[bool, Order]:
    """The result is a new contiguous tensor."""
    return False, in_order(result)


def followed(op: Op, shape: Shape, order: Order, result: Shape) -> tuple[bool, Order]:
    """The result is a new tensor with the operand's memory format if their shapes are equal, unless the call requests
    another format.
    """
    requests_format = any(key == "memory_format" and "preserve" not in str(value) for key, value in op.kwargs)
    return False, _packed(shape, order) if shape == result and not requests_format else in_order(result)


def same(op: Op, shape: Shape, order: Order, result: Shape) -> tuple[bool, Order]:
    """The result is the operand itself."""
    return True, order


def part(op: Op, shape: Shape, order: Order, result: Shape) -> tuple[bool, Order]:
    """The result is a view of some of the operand's elements."""
    return True, order if len(shape) == len(result) else in_order(result)


def regrouped(op: Op, shape: Shape, order: Order, result: Shape) -> tuple[bool, Order]:
    """The result has the same sequence of elements in another shape: a view where the operand's order allows one."""
    strides = _regrouped_strides(shape, order.strides, result)
    return (False, in_order(result)) if strides is None else (True, Order(strides))


def expanded(op: Op, shape: Shape, order: Order, result: Shape) -> tuple[bool, Order]:
    """The result is a view that repeats elements."""
    added = len(result) - len(shape)
    before, strides = (1,) * added + shape, (0,) * added + order.strides
    sizes = zip(before, result, strides, strict=True)
    return True, Order(tuple(0 if old_size != size else stride for old_size, size, stride in sizes))


def permuted(order_dims: Callable[[Op, list[int]], list[int] | None]) -> PlaceResult:
    """The result is a view with the dims in another order, which `order_dims` returns for the op and dims 0, 1 ..."""

    def place(op: Op, shape: Shape, order: Order, result: Shape) -> tuple[bool, Order]:
        dims = order_dims(op, list(range(len(shape))))
        return True, order if dims is None else Order(tuple(order.strides[dim] for dim in dims))

    return place


def _packed(shape: Shape, order: Order) -> Order:
    """The order of a new tensor without gaps whose dims are in the same order in memory."""
    strides = [0] * len(shape)
    step = 1
    # Dims of one element, and expanded dims, are ordered by their index.
    for dim in sorted(range(len(shape)), key=lambda dim: (order.strides[dim], -dim)):
        strides[dim] = step
        step *= shape[dim]
    return Order(tuple(strides))


def _regrouped_strides(before: Shape, strides: Shape, after: Shape) -> Shape | None:
    """The strides of the same sequence of elements in another shape; None if that needs a copy."""
    if 0 in after:
        return in_order(after).strides
    # Consecutive dims with evenly spaced elements form one run: (number of elements, stride).
    runs: list[tuple[int, int]] = []
    for size, stride in zip(before, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == stride * size:
            runs[-1] = runs[-1][0] * size, stride
        else:
            runs.append((size, stride))
    results: list[int] = []
    remaining, stride = runs.pop() if runs else (1, 1)
    for size in reversed(after):
        if size > 1 and remaining == 1 and runs:
            remaining, stride = runs.pop()
        if remaining % size:
            return None
        results.append(stride)
        remaining //= size
        stride *= size
    return tuple(reversed(results)) if remaining == 1 and not runs else None
