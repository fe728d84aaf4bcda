"""Shared parts of all communicators: the record of a collective, handles, and stacking along any tensor dim.

A backend moves *stacked* buffers only, whose leading dim is the coordinate on the axis; here that leading dim
is cut out of, or merged into, any dim of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from autopar.placement import Axis

__all__ = [
    "Collective",
    "Handle",
    "ReduceOp",
    "Watch",
    "merge_stack",
    "reduce_stack",
    "split_rows",
    "split_stack",
]

ReduceOp = Literal["sum", "max"]


@dataclass(frozen=True)
class Collective:
    """One collective that ran.

    `kind` is a collective of `autopar.placement.Step`, ``"broadcast"``, or ``"send"`` (on the sender only).
    `num_bytes` is the size of one member's buffer on its larger side (`Step.fraction` times the bytes of the global
    tensor).
    """

    kind: str
    axis: Axis
    num_bytes: int


class Handle:
    """A collective under way.  `wait` gives its result, as often as it is called."""

    def __init__(
        self,
        finish: Callable[[], Tensor],
        on_arrival: Callable[[Callable[[], None]], object] | None = None,
        is_done: Callable[[], bool] | None = None,
    ) -> None:
        """`finish` blocks (the host, or the current stream) until the result is there; it is called once.

        `on_arrival` has a function called as soon as it is there; without it that is when it has been waited for.
        `is_done` says without blocking whether it is there.
        """
        self._is_done = is_done
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None
        self._on_arrival = on_arrival
        self._waiting: list[Callable[[], None]] = []

    def wait(self) -> Tensor:
        """The result."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
            for action in self._waiting:
                action()
        assert self._result is not None
        return self._result

    def on_arrival(self, action: Callable[[], None]) -> None:
        """Call `action` once, in any thread, when the result is there (as far as that is known: when waited for)."""
        if self._on_arrival is None:
            self._waiting.append(action)
        else:
            self._on_arrival(action)

    def is_done(self) -> bool:
        """Whether it is known to be over, without waiting; False where nobody can say."""
        return self._finish is None or (self._is_done is not None and self._is_done())

    def then(self, change: Callable[[Tensor], Tensor]) -> Handle:
        """A handle for ``change(result)``, computed when waited for."""
        return Handle(lambda: change(self.wait()), self.on_arrival)


def split_stack(x: Tensor, size: int, dim: int) -> Tensor:
    """``[.., size * n, ..] -> [size, .., n, ..]``, contiguous: equal slices of `dim`, stacked.

    Raises:
        ValueError: `dim` does not divide by `size`.
    """
    if x.shape[dim] % size:
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by {size} devices")
    sizes = (*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
    return torch.movedim(x.reshape(sizes), dim, 0).contiguous()


def split_rows(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Consecutive views of `x` with these numbers of rows (dim 0)."""
    ends = [0, *accumulate(counts)]
    return [x[start:stop] for start, stop in pairwise(ends)]


def merge_stack(stack: Tensor, dim: int) -> Tensor:
    """``[size, .., n, ..] -> [.., size * n, ..]``, contiguous: the inverse of `split_stack`."""
    return torch.movedim(stack, 0, dim).flatten(dim, dim + 1).contiguous()


def reduce_stack(stack: Tensor, op: ReduceOp) -> Tensor:
    """Reduce the leading dim, in its order; 16-bit floats accumulate in float32, bool sums are "any"."""
    if op == "max":
        return stack.amax(0)
    if stack.dtype is torch.bool:
        return stack.any(0)
    return stack.sum(0, dtype=stack.dtype)


Watch = Callable[[Collective, tuple[str, str]], Callable[[Handle], Handle]]
"""Gets a collective that is about to start and what it serves, and gives what its handle is to be passed through."""
