"""The class `Transport`: what a backend of collectives implements, as far as its programs need it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from autopar.lower.communication.collectives import Handle, ReduceOp, split_rows
from autopar.placement import Axis

__all__ = ["Transport"]


class Transport:
    """Moves contiguous tensors between the members of an axis, none of which it writes to.

    Every method starts something and gives its handle.  Axes have several members; tensors of all members are stacked
    along a new leading dim, in coordinate order.

    Attributes:
        rank: this device's logical rank, 0 <= rank < world_size.
        world_size: number of devices that the program runs on.
        device: where this rank's tensors are.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        """`rank` is logical: the position among the ranks that the program runs on."""
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def _guard(self, kind: str, axis: Axis, start: Callable[[], Handle]) -> Handle:
        """Start a collective, of which a backend may say more where it fails."""
        return start()

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Create what collectives on `axes` need; every rank calls it with the same axes, in one order."""

    def _start_gather(self, x: Tensor, axis: Axis) -> Handle:
        """``[...] -> [size, ...]``, the members' tensors in coordinate order."""
        raise NotImplementedError

    def _start_scatter_sum(self, stack: Tensor, axis: Axis) -> Handle:
        """``[size, ...] -> [...]``, this coordinate's entry of the sum of the members' stacks."""
        raise NotImplementedError

    def _start_reduce(self, x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
        """``[...] -> [...]``, reduced over the members; must not write to `x`."""
        raise NotImplementedError

    def _start_exchange(self, stack: Tensor, axis: Axis) -> Handle:
        """``[size, ...] -> [size, ...]``, entry c to and from coordinate c."""
        raise NotImplementedError

    def _start_exchange_rows(self, x: Tensor, axis: Axis, sent: tuple[int, ...], received: tuple[int, ...]) -> Handle:
        """``[sum of sent, ...] -> [sum of received, ...]``; by default a message per pair that exchanges anything."""
        own = axis.coordinate(self.rank)
        parts = split_rows(x, sent)
        others = [coordinate for coordinate in range(axis.size) if coordinate != own]
        sending = [self._start_send(parts[to], axis, to) for to in others if sent[to]]
        coming = {
            source: self._start_receive((received[source], *x.shape[1:]), x.dtype, axis, source)
            for source in others if received[source]
        }  # fmt: skip

        def finish() -> Tensor:
            rows = [
                parts[own] if source == own else coming[source].wait() if source in coming else x[:0]
                for source in range(axis.size)
            ]
            for each in sending:
                each.wait()
            return torch.cat(rows)

        return Handle(finish)

    def _start_broadcast(self, x: Tensor, axis: Axis, source: int) -> Handle:
        """``[...] -> [...]``, the tensor of coordinate `source`; must not write to `x`."""
        raise NotImplementedError

    def _start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        """Send `x` to coordinate `to`; keeps it until it is sent, also if nobody keeps the handle."""
        raise NotImplementedError

    def _start_receive(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        """``[...]``, what coordinate `source` sends next."""
        raise NotImplementedError

    def _start_permute(self, x: Tensor, axis: Axis, to: int, source: int) -> Handle:
        """``[...] -> [...]``; by default a message each way, none of which waits for the other."""
        if to == axis.coordinate(self.rank):
            return Handle(lambda: x)
        sent = self._start_send(x, axis, to)
        received = self._start_receive(tuple(x.shape), x.dtype, axis, source)

        def finish() -> Tensor:
            came = received.wait()
            sent.wait()
            return came

        return Handle(finish)
