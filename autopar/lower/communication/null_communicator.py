"""One rank of a world of any size, alone: collectives give tensors of the right shape and dtype, at once.

For timing what a rank computes: nothing waits, and the local copies that belong to a collective's price are not made
either, but for the first time that tensors of a shape come along.
"""

from __future__ import annotations

from collections.abc import Callable

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
        num_bytes = x.nbytes * axis.size
        return self._give("all_gather", x, axis, num_bytes, lambda: torch.cat([x.detach()] * axis.size, dim), dim)

    def start_gather_stack(self, x: Tensor, axis: Axis) -> Handle:
        """See `Communicator.start_gather_stack`."""
        num_bytes = x.nbytes * axis.size
        return self._give("all_gather", x, axis, num_bytes, lambda: torch.stack([x.detach()] * axis.size))

    def start_scatter_stack(self, stack: Tensor, axis: Axis) -> Handle:
        """See `Communicator.start_scatter_stack`."""
        return self._give("reduce_scatter", stack, axis, stack.nbytes, lambda: stack.detach()[0].clone())

    def start_reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """See `Communicator.start_reduce_scatter`."""
        return self._give("reduce_scatter", x, axis, x.nbytes, lambda: _parts(x, axis, dim)[0].clone(), dim)

    def start_all_reduce(self, x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Handle:
        """See `Communicator.start_all_reduce`."""
        return self._give("all_reduce", x, axis, x.nbytes, lambda: _copy(x))

    def start_all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Handle:
        """See `Communicator.start_all_to_all`."""

        def make() -> Tensor:
            return merge_stack(_parts(x, axis, split_dim), concat_dim % x.ndim)

        return self._give("all_to_all", x, axis, x.nbytes, make, split_dim, concat_dim)

    def start_broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Handle:
        """See `Communicator.start_broadcast`."""
        return self._give("broadcast", x, axis, x.nbytes, lambda: _copy(x))

    def start_permute(self, x: Tensor, axis: Axis, to: int, source: int) -> Handle:
        """See `Communicator.start_permute`."""
        return self._give("send", x, axis, x.nbytes, lambda: _copy(x))

    def _start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        return Handle(lambda: x)

    def _start_receive(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        return Handle(lambda: torch.zeros(shape, dtype=dtype, device=self.device))

    def _give(self, kind: str, x: Tensor, axis: Axis, num_bytes: int, make: Callable[[], Tensor], *dims: int) -> Handle:
        if axis.size == 1:
            return Handle(x.detach().contiguous)
        self._note(kind, axis, num_bytes)
        key = (kind, axis.size, dims, x.shape, x.dtype)
        result = self._known.get(key)
        if result is None:
            result = make()
        if self._is_keeping:
            self._known[key] = result
        return Handle(lambda: result)


def _copy(x: Tensor) -> Tensor:
    return x.detach().contiguous().clone()


def _parts(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return split_stack(x.detach(), axis.size, dim % x.ndim)
