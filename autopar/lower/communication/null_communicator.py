"""One rank of a world of any size, alone: collectives give tensors of the right shape and dtype, at once.

For timing what a rank computes: nothing waits, and the local copies that belong to a collective's price are not made
either, but for the first time that tensors of a shape come along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from autopar.lower.communication.collectives import Collective, Handle, ReduceOp, merge_stack, split_stack
from autopar.lower.communication.communicator import TracedCommunicator
from autopar.placement import Axis

__all__ = ["NullCommunicator"]


class NullCommunicator(TracedCommunicator):
    """A `Communicator` whose other ranks always had what this one has.

    What a collective gives is kept for the next of its kind with operands of that shape and dtype, whatever their
    values: time a program that doesn't write to it.

    >>> NullCommunicator(8).all_gather(torch.ones(2, 3), Axis(8, 1), 0).shape
    torch.Size([16, 3])
    """

    def __init__(
        self, world_size: int, device: torch.device | str = "cpu", rank: int = 0, *, is_keeping: bool = True
    ) -> None:
        """`rank` of `world_size`, with tensors on `device`; unless `is_keeping` results are made anew each time."""
        super().__init__(rank, world_size, torch.device(device))
        self._is_keeping = is_keeping
        self._known: dict[tuple[object, ...], Tensor] = {}

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Nothing to prepare."""

    def traced(self) -> NullCommunicator:
        """See `Communicator.traced`.

        A program is traced several times over: what one pass made would be a constant to the next.
        """
        return NullCommunicator(self.world_size, self.device, self.rank, is_keeping=False)

    def collectives_in(self, module: torch.fx.GraphModule) -> tuple[Collective, ...]:
        """None: what a collective gives is made up."""
        return ()

    def start_all_gather(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """See `Communicator.start_all_gather`."""
        if axis.size == 1:
            return super().start_all_gather(x, axis, dim)
        self._note("all_gather", axis, x.nbytes * axis.size)
        return self._give(("all_gather", axis.size, dim), x, lambda: torch.cat([x.detach()] * axis.size, dim))

    def start_reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """See `Communicator.start_reduce_scatter`."""
        if axis.size == 1:
            return super().start_reduce_scatter(x, axis, dim)
        self._note("reduce_scatter", axis, x.nbytes)
        return self._give(("reduce_scatter", axis.size, dim), x, lambda: _parts(x, axis, dim)[0].clone())

    def start_all_reduce(self, x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Handle:
        """See `Communicator.start_all_reduce`."""
        if axis.size == 1:
            return super().start_all_reduce(x, axis, op)
        self._note("all_reduce", axis, x.nbytes)
        return self._give(("all_reduce",), x, lambda: _copy(x))

    def start_all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Handle:
        """See `Communicator.start_all_to_all`."""
        if axis.size == 1:
            return super().start_all_to_all(x, axis, split_dim, concat_dim)
        self._note("all_to_all", axis, x.nbytes)
        key = ("all_to_all", axis.size, split_dim, concat_dim)
        return self._give(key, x, lambda: merge_stack(_parts(x, axis, split_dim), concat_dim % x.ndim))

    def _start_broadcast(self, x: Tensor, axis: Axis, source: int) -> Handle:
        return self._give(("broadcast",), x, lambda: _copy(x))

    def _start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        return Handle(lambda: x)

    def _start_receive(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        return Handle(lambda: torch.zeros(shape, dtype=dtype, device=self.device))

    def _start_gather(self, x: Tensor, axis: Axis) -> Handle:
        return self._give(("gather", axis.size), x, lambda: torch.stack([x] * axis.size))

    def _start_scatter_sum(self, stack: Tensor, axis: Axis) -> Handle:
        return self._give(("scatter",), stack, lambda: stack[0].clone())

    def _start_reduce(self, x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
        return self._give(("reduce",), x, lambda: _copy(x))

    def _start_exchange(self, stack: Tensor, axis: Axis) -> Handle:
        return self._give(("exchange",), stack, lambda: _copy(stack))

    def _give(self, how: Sequence[object], x: Tensor, make: Callable[[], Tensor]) -> Handle:
        key = (*how, x.shape, x.dtype)
        found = self._known.get(key)
        if found is None:
            found = make()
        if self._is_keeping:
            self._known[key] = found
        return Handle(lambda: found)


def _copy(x: Tensor) -> Tensor:
    return x.detach().contiguous().clone()


def _parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return split_stack(x.detach(), axis.size, dim % x.ndim)
