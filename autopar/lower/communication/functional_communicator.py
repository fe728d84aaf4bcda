"""Collectives as ops of a traced graph, for compiled layers: inductor sees them and may overlap compute with them.

Only tracing calls it; what is traced then runs on the process groups themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.lower import compat
from autopar.lower.communication.collectives import Collective, Handle, ReduceOp
from autopar.lower.communication.communicator import Communicator, TracedCommunicator
from autopar.placement import Axis

__all__ = ["FunctionalCommunicator", "GroupOrder"]


class GroupOrder(NamedTuple):
    """The process group of an axis by name, and the order of its members.

    `to_group` and `from_group` permute coordinates of the axis to ranks of the group and back; None: the same order.
    """

    name: str
    to_group: list[int] | None
    from_group: list[int] | None


class FunctionalCommunicator(TracedCommunicator):
    """See `Communicator`; the stacked buffers travel by functional collectives.  No layer broadcasts.

    Args:
        like: whose rank, world and device it has.
        order_of: the process group of an axis.
        carries: the dtypes that the process groups carry as they are; others travel as bytes.  Empty: all.
    """

    def __init__(
        self, like: Communicator, order_of: Callable[[Axis], GroupOrder], carries: Iterable[torch.dtype] = ()
    ) -> None:
        """See the class."""
        super().__init__(like.rank, like.world_size, like.device)
        self._order_of = order_of
        self._carries = frozenset(carries)
        self._axes: dict[str, Axis] = {}

    def prepare(self, axes: Iterable[Axis]) -> None:
        """See `Communicator.prepare`."""
        for axis in axes:
            self._order(axis)

    def collectives_in(self, module: torch.fx.GraphModule) -> tuple[Collective, ...]:
        """What a graph that was traced with this communicator runs."""
        result = compat.functional_collectives(module)
        return tuple(Collective(kind, self._axes[group], num_bytes) for kind, group, num_bytes in result)

    def _order(self, axis: Axis) -> GroupOrder:
        order = self._order_of(axis)
        self._axes.setdefault(order.name, axis)
        return order

    def _start_gather(self, x: Tensor, axis: Axis) -> Handle:
        order = self._order(axis)
        sent = self._carried(x)
        gathered = compat.functional_all_gather(sent.reshape(-1), axis.size, order.name)
        return self._received(gathered, (axis.size, *sent.shape), x.dtype, order.from_group)

    def _start_exchange(self, stack: Tensor, axis: Axis) -> Handle:
        order = self._order(axis)
        sent = self._carried(stack if order.to_group is None else stack[order.to_group])
        each = [1] * axis.size
        received = compat.functional_all_to_all(sent.contiguous(), each, each, order.name)
        return self._received(received, tuple(sent.shape), stack.dtype, order.from_group)

    def _start_permute(self, x: Tensor, axis: Axis, to: int, source: int) -> Handle:
        order = self._order(axis)
        in_group = order.from_group or list(range(axis.size))
        sent = self._carried(x)
        there, here = ([int(rank == in_group[peer]) for rank in range(axis.size)] for peer in (to, source))
        received = compat.functional_all_to_all(sent.unsqueeze(0), there, here, order.name)
        return self._received(received, sent.shape, x.dtype, None)

    def _start_scatter_sum(self, stack: Tensor, axis: Axis) -> Handle:
        order = self._order(axis)
        sent = self._summed(stack if order.to_group is None else stack[order.to_group])
        result = compat.functional_reduce_scatter(sent.reshape(-1), axis.size, order.name)
        return Handle(lambda: compat.functional_wait(result).view(stack.shape[1:]).to(stack.dtype))

    def _start_reduce(self, x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
        result = compat.functional_all_reduce(self._summed(x), op, self._order(axis).name)
        return Handle(lambda: compat.functional_wait(result).to(x.dtype))

    def _carried(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).view(torch.uint8) if self._carries and x.dtype not in self._carries else x

    def _summed(self, x: Tensor) -> Tensor:
        """In a dtype in which the process groups add up as `Communicator` promises."""
        if x.dtype is torch.bool:
            return x.to(torch.int32)
        return x.float() if self._carries and x.element_size() == 2 and x.is_floating_point() else x

    def _received(self, result: Tensor, shape: Sequence[int], dtype: torch.dtype, order: list[int] | None) -> Handle:
        def finish() -> Tensor:
            buffer = compat.functional_wait(result).view(tuple(shape))
            if buffer.dtype is not dtype:
                buffer = buffer.view(dtype).squeeze(-1)
            return buffer if order is None else buffer[order]

        return Handle(finish)
