"""The real communicator, on torch.distributed: gloo for CPU tensors, otherwise the device's own backend."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, MeshError, RankError
from autopar.lower.communication import torch_groups
from autopar.lower.communication.call_consensus import POLL_S, CallConsensus
from autopar.lower.communication.collectives import Handle, ReduceOp, reduce_stack, split_rows
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.consensus import naming_lost_ranks
from autopar.lower.communication.failures import is_out_of_memory
from autopar.lower.communication.functional_communicator import FunctionalCommunicator, GroupOrder
from autopar.lower.communication.message_waits import wait_for_message
from autopar.lower.communication.process_end import settle_gloo_at_exit
from autopar.placement import Axis

__all__ = ["ProcessGroupCommunicator"]

T = TypeVar("T")

_ONE_STORE_RANKS = 256  # their exchanges take 6 ms of the CPU of a store's server, in every step

# What gloo carries as it is; other dtypes travel as bytes.
_GLOO_DTYPES = {
    torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
}  # fmt: skip
_GLOO_SUM_DTYPES = _GLOO_DTYPES - {torch.float16}  # gloo would sum those in 16 bits
# Buffers up to this size go straight to each member: gloo's gather and all-reduce pass them round a ring, and
# with 2 to 4 processes on one machine that took 1.3 to 2 times as long.
_DIRECT_BYTES = 1 << 20


class _AxisGroup:
    """One process group, and where the axis' coordinates stand in it (torch sorts a group's ranks)."""

    def __init__(self, process_group: dist.ProcessGroup, members: Sequence[int]) -> None:
        self.process_group = process_group
        self.members = tuple(members)
        in_group = sorted(members)
        is_sorted = list(members) == in_group
        self.from_group = None if is_sorted else [in_group.index(member) for member in members]
        self.to_group = None if is_sorted else [list(members).index(member) for member in in_group]


class ProcessGroupCommunicator(Communicator):
    """See `Communicator`.  Logical rank i is process ``ranks[i]``; all processes in `ranks` take part.

    Example:
        >>> communicator = ProcessGroupCommunicator(mesh.mesh.flatten().tolist(), device="cpu")
    """

    def __init__(self, ranks: Sequence[int] | None = None, device: torch.device | str = "cpu") -> None:
        """`ranks` are ranks of the default process group, None for all of them in order.

        Raises:
            MeshError: there is no process group, or this process is not among `ranks`.
        """
        if not dist.is_initialized():
            raise MeshError(
                "no process group: start the script with torchrun, or call torch.distributed.init_process_group() first"
            )
        self._ranks = tuple(range(dist.get_world_size())) if ranks is None else tuple(ranks)
        if dist.get_rank() not in self._ranks:
            raise MeshError(
                f"process {dist.get_rank()} is not in the mesh of ranks {self._ranks}: "
                "call this only on the ranks of the mesh"
            )
        super().__init__(self._ranks.index(dist.get_rank()), len(self._ranks), torch.device(device))
        self._groups: dict[Axis, _AxisGroup] = {}
        self._opens_world = self._is_gloo  # what a failed step leaves there would meet other collectives of the caller
        self._later: list[Axis] | None = None  # while groups are not to be opened: whose
        self._is_traced = False
        self._host_group: dist.ProcessGroup | None = None  # for numbers, where the devices have another backend
        settle_gloo_at_exit()
        if self.world_size > 1:
            timeout = torch_groups.world_timeout()
            store = torch_groups.open_store(self._ranks)
            self.calls = CallConsensus(
                store, self.rank, self.world_size, self.device,
                *([] if timeout is None else [timeout.total_seconds()]),
                host_store=torch_groups.open_host_store(store) if self.world_size > _ONE_STORE_RANKS else None,
            )  # fmt: skip
            self.calls.renew, self.calls.close = self._renew, self._close
        self._sending: list[_Sending] = []

    def prepare(self, axes: Iterable[Axis]) -> None:
        """See `Communicator.prepare`."""
        for axis in axes:
            if self._later is not None:
                self._later.append(axis)
            elif axis.size > 1:
                self._group(axis)

    @contextmanager
    def preparing_later(self) -> Generator[None]:
        """Inside, `prepare` only notes axes, whose groups are opened at the end unless something was raised.

        Ranks wait for each other where they open a group, so one that fails before would leave the others there.
        """
        later: list[Axis] = []
        self._later = later
        try:
            yield
        finally:
            self._later = None
        self.prepare(later)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of all ranks of the mesh."""
        return self._group(Axis(self.world_size, 1)).process_group

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """See `Communicator.gather_numbers`."""
        if self._is_gloo or self.world_size == 1:
            return super().gather_numbers(numbers)
        everybody = Axis(self.world_size, 1)
        if self._host_group is None:
            self._host_group = torch_groups.open_group(self._ranks, backend="gloo")
        own = torch.tensor([numbers], device="cpu")
        stack = own.new_empty((self.world_size, *own.shape))
        in_group = sorted(self._ranks)
        order = [in_group.index(rank) for rank in self._ranks]
        group, look = self._host_group, None if self.calls is None else self.calls.look

        def start() -> Handle:
            return _Received(torch_groups.start_all_gather(stack, own, group), stack, own, order, look).to_handle()

        gathered: Any = self._guard("all_gather", everybody, start).wait()
        return gathered.flatten(0, 1).tolist()

    def traced(self) -> FunctionalCommunicator:
        """See `Communicator.traced`."""
        self._is_traced = True
        return FunctionalCommunicator(self, self._order_of, _GLOO_DTYPES if self._is_gloo else ())

    def _order_of(self, axis: Axis) -> GroupOrder:
        group = self._group(axis)
        return GroupOrder(torch_groups.group_name(group.process_group), group.to_group, group.from_group)

    def _group(self, axis: Axis) -> _AxisGroup:
        if axis not in self._groups:
            members = [self._ranks[rank] for rank in axis.group(self.rank)]
            with naming_lost_ranks():
                opened = _open_group(members, opens_world=self._opens_world)
            self._groups[axis] = _AxisGroup(opened, members)
        return self._groups[axis]

    def _close(self) -> None:
        """End what is left in the groups, threads that wait for it included: they would abort Python at its end."""
        if self._is_gloo:
            for group in self._groups.values():
                torch_groups.close_group(group.process_group)

    def _renew(self) -> None:
        """Open new groups where old ones have collectives and messages that some rank left; all ranks call it."""
        if self._is_traced:
            raise RankError("compiled layers have the process groups that a failed step left collectives in")
        self._close()
        axes, self._groups, self._host_group = sorted(self._groups), {}, None
        self._opens_world = True
        self._sending.clear()
        self.prepare(axes)
        for restore in self.after_renewal:
            restore()

    @property
    def _is_gloo(self) -> bool:
        return self.device.type == "cpu"

    def _start_gather(self, x: Tensor, axis: Axis) -> Handle:
        if self._is_gloo and x.nbytes * axis.size <= _DIRECT_BYTES:
            return self._start_exchange(x.expand(axis.size, *x.shape).contiguous(), axis)
        group = self._group(axis)
        sent = self._carried(x)
        stack = sent.new_empty((axis.size, *sent.shape))
        work = torch_groups.start_all_gather(stack, sent, group.process_group)
        return _Received(work, stack, x, group.from_group, self._look).to_handle()

    def _start_exchange(self, stack: Tensor, axis: Axis) -> Handle:
        group = self._group(axis)
        sent = self._carried(stack if group.to_group is None else stack[group.to_group])
        received = torch.empty_like(sent)
        work = torch_groups.start_all_to_all(received, sent, group.process_group)
        return _Received(work, received, stack, group.from_group, self._look).to_handle()

    def _start_exchange_rows(self, x: Tensor, axis: Axis, sent: tuple[int, ...], received: tuple[int, ...]) -> Handle:
        group = self._group(axis)
        buffer = self._carried(x)
        to, back = (order or list(range(axis.size)) for order in (group.to_group, group.from_group))
        if group.to_group is not None:
            buffer = torch.cat([split_rows(buffer, sent)[coordinate] for coordinate in to])
        given, got = ([counts[coordinate] for coordinate in to] for counts in (sent, received))
        result = buffer.new_empty((sum(received), *buffer.shape[1:]))
        work = torch_groups.start_all_to_all(result, buffer, group.process_group, got, given)
        handle = _Received(work, result, x, None, self._look).to_handle()
        if group.from_group is None:
            return handle
        return handle.then(lambda rows: torch.cat([split_rows(rows, got)[place] for place in back]))

    def _start_scatter_sum(self, stack: Tensor, axis: Axis) -> Handle:
        if self._is_gloo:  # its own reduce-scatter is slower, and sums 16-bit floats in 16 bits
            return self._start_exchange(stack, axis).then(lambda got: reduce_stack(got, "sum"))
        group = self._group(axis)
        sent = stack if group.to_group is None else stack[group.to_group]
        result = torch.empty_like(sent[0])
        work = torch_groups.start_reduce_scatter(result, sent, group.process_group)
        return _Received(work, result, result, None, self._look).to_handle()

    def _start_reduce(self, x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
        if self._is_gloo and x.nbytes * axis.size <= _DIRECT_BYTES:
            return self._start_gather(x, axis).then(lambda stack: reduce_stack(stack, op))
        if self._is_gloo and x.dtype not in _GLOO_SUM_DTYPES:
            return self._start_reduce_in_parts(x, axis, op)
        result = x.clone()
        work = torch_groups.start_all_reduce(result, op, self._group(axis).process_group)
        return _Received(work, result, x, None, self._look).to_handle()

    def _start_reduce_in_parts(self, x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
        """Each coordinate reduces a part of the elements in `reduce_stack`'s precision and hands it round."""
        padding = -x.numel() % axis.size
        parts = torch.nn.functional.pad(x.flatten(), (0, padding)).view(axis.size, -1)
        exchanged = self._start_exchange(parts, axis)

        def hand_round(stack: Tensor) -> Tensor:
            whole = self._start_gather(reduce_stack(stack, op), axis).wait()
            return whole.flatten()[: x.numel()].view(x.shape)

        return exchanged.then(hand_round)

    def _start_broadcast(self, x: Tensor, axis: Axis, source: int) -> Handle:
        group = self._group(axis)
        result = self._carried(x).clone()
        work = torch_groups.start_broadcast(result, group.members[source], group.process_group)
        return _Received(work, result, x, None, self._look).to_handle()

    def _start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        group = self._group(axis)
        work = torch_groups.start_send(self._carried(x), group.members[to], group.process_group)
        sending = _Sending(work, x, self._look)
        self._sending = [*(other for other in self._sending if not other.is_done()), sending]
        return sending.to_handle()

    def _start_receive(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        group = self._group(axis)
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        work = torch_groups.start_receive(self._carried(buffer), group.members[source], group.process_group)
        return _Received(work, buffer, buffer, None, self._look, is_message=True).to_handle()

    def _start_permute(self, x: Tensor, axis: Axis, to: int, source: int) -> Handle:
        if self._is_gloo or to == axis.coordinate(self.rank):  # gloo's messages don't wait for each other
            return super()._start_permute(x, axis, to, source)
        group = self._group(axis)
        result = torch.empty_like(x)
        works = torch_groups.start_permute(result, x, group.members[to], group.members[source], group.process_group)

        def finish() -> Tensor:
            for work in works:
                work.wait()
            return result

        return Handle(finish)

    @property
    def _look(self) -> Callable[[], None] | None:
        """What to do while a collective is waited for: gloo's, as the host does not wait for others."""
        return self.calls.look if self.calls is not None and self._is_gloo else None

    def _guard(self, kind: str, axis: Axis, start: Callable[[], Handle]) -> Handle:
        calls, purpose = self.calls, self._purpose
        if calls is None:
            return start()

        def named(act: Callable[[], T]) -> T:
            try:
                return act()
            except Exception as error:
                calls.is_torn = True
                if isinstance(error, AutoparError) or is_out_of_memory(error):
                    raise
                serving = f" ({' of '.join(purpose)})" if purpose[0] else ""
                ranks = [self._ranks[rank] for rank in axis.group(self.rank)]
                raise calls.lost(f"{kind}{serving} with ranks {ranks}", error) from error

        handle = named(start)
        return Handle(lambda: named(handle.wait), handle.on_arrival, handle.is_done)

    def _carried(self, x: Tensor) -> Tensor:
        if not self._is_gloo or x.dtype in _GLOO_DTYPES:
            return x
        return x.unsqueeze(-1).view(torch.uint8)


class _Sending:
    """A message on its way.  The communicator keeps it: gloo drops a message whose work is let go of."""

    def __init__(self, work: dist.Work, x: Tensor, look: Callable[[], None] | None) -> None:
        self._work = work
        self._x = x
        self._look = look
        self._is_waited_for = False

    def to_handle(self) -> Handle:
        # nothing here refers to it: a circle would keep the buffers until Python looks for circles
        return Handle(self._finish, is_done=self.is_done)

    def is_done(self) -> bool:
        # gloo calls a send completed only after it was waited for
        return self._is_waited_for or self._work.is_completed()

    def _finish(self) -> Tensor:
        if self._look is None:
            self._work.wait()
        else:
            wait_for_message(self._work, POLL_S, self._look)
        self._is_waited_for = True
        return self._x


class _Received:
    """A buffer that fills up, to be viewed as the dtype of `like` and put into coordinate order."""

    def __init__(
        self,
        work: dist.Work,
        buffer: Tensor,
        like: Tensor,
        order: list[int] | None,
        look: Callable[[], None] | None = None,
        *,
        is_message: bool = False,
    ) -> None:
        """`look` is called now and then while it is waited for."""
        self._look = look
        self._wait = wait_for_message if is_message else torch_groups.wait_for
        self._work = work
        self._buffer = buffer
        self._dtype = like.dtype
        self._order = order

    def to_handle(self) -> Handle:
        # nothing here refers to it: a circle would keep the buffers until Python looks for circles
        return Handle(self._finish, self._on_arrival if self._buffer.device.type == "cpu" else None)

    def _on_arrival(self, action: Callable[[], None]) -> None:
        torch_groups.on_completion(self._work, action)

    def _finish(self) -> Tensor:
        if self._look is None:
            self._work.wait()
        else:
            self._wait(self._work, POLL_S, self._look)
        buffer = self._buffer
        if buffer.dtype is not self._dtype:
            buffer = buffer.view(self._dtype).squeeze(-1)
        return buffer if self._order is None else buffer[self._order]


def _open_group(members: Sequence[int], *, opens_world: bool) -> dist.ProcessGroup:
    if not opens_world and sorted(members) == list(range(dist.get_world_size())):
        world = dist.group.WORLD
        assert world is not None
        return world
    return torch_groups.open_group(members)
