"""The class `Communicator`: the collectives and messages of a lowered program.

`ProcessGroupCommunicator` talks through torch.distributed; `simulate` runs every rank as a thread of this process.
Both know `Axis` objects, never process groups by name, so a program is the same on either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.lower.communication.call_consensus import CallConsensus
from autopar.lower.communication.collectives import (
    Collective,
    Handle,
    ReduceOp,
    Watch,
    merge_stack,
    split_stack,
)
from autopar.lower.communication.transport import Transport
from autopar.placement import Axis

__all__ = ["Communicator", "TracedCommunicator"]

T = TypeVar("T")


class Communicator(Transport):
    """Collectives on local tensors, along mesh axes, for one rank.

    The members of a collective are ``axis.group(rank)``, in coordinate order.  Operands may be non-contiguous
    and are never written to; results are contiguous and fresh, except on an axis of size 1, where nothing
    happens, nothing is recorded, and the operand itself may come back.  Sums of 16-bit floats accumulate in
    float32.  ``bool`` sums are "any".  Every ``start_*`` returns at once (where the backend can) and
    ``wait()`` gives the result; all members must start their collectives in the same order.

    A backend implements `Transport`.

    Attributes (and those of `Transport`):
        calls: compares what ranks do, where they are processes of their own.
        after_renewal: what all ranks do, in order, when they go on after a call that failed in its middle.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        """`rank` is logical: the position among the ranks that the program runs on."""
        super().__init__(rank, world_size, device)
        self._records: list[list[Collective]] = []
        self._watch: Watch | None = None
        self._purpose = ("", "")
        self.calls: CallConsensus | None = None
        self.after_renewal: list[Callable[[], None]] = []

    @contextmanager
    def recording(self) -> Generator[list[Collective]]:
        """A context in which every collective of this rank is appended to the list that it yields.

        Contexts nest, and each sees all collectives inside it.
        """
        record: list[Collective] = []
        self._records.append(record)
        try:
            yield record
        finally:
            # by identity: two records may be equal
            self._records = [other for other in self._records if other is not record]

    @contextmanager
    def watching(self, watch: Watch) -> Generator[None]:
        """A context in which `watch` gets every collective before it starts, but those of compiled layers."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def serving(self, category: str, layer: str) -> Generator[None]:
        """A context whose collectives serve parameters of `layer`: ``"gather"`` or ``"reduce"``; for `watching`."""
        before, self._purpose = self._purpose, (category, layer)
        try:
            yield
        finally:
            self._purpose = before

    def made_once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, which depends on `key` alone; ranks that share a process make it once.

        It must not communicate.
        """
        return make()

    def traced(self) -> TracedCommunicator:
        """A communicator for the time in which a program is traced, to be compiled."""
        raise NotImplementedError(f"{type(self).__name__} can't be part of a compiled program")

    def note(self, collectives: Iterable[Collective]) -> None:
        """Record collectives that a compiled program runs by itself."""
        for record in self._records:
            record.extend(collectives)

    def all_gather(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """The members' `x` joined along `dim`."""
        return self.start_all_gather(x, axis, dim).wait()

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """This coordinate's equal slice along `dim` of the members' sum."""
        return self.start_reduce_scatter(x, axis, dim).wait()

    def all_reduce(self, x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Tensor:
        """The members' sum or elementwise maximum."""
        return self.start_all_reduce(x, axis, op).wait()

    def all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        """Slice c of `split_dim` goes to coordinate c; the slices received are joined along `concat_dim`."""
        return self.start_all_to_all(x, axis, split_dim, concat_dim).wait()

    def broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Tensor:
        """The `x` of coordinate `source`; shape and dtype must be equal on all members."""
        return self.start_broadcast(x, axis, source).wait()

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The equally many integers of every rank, by rank; the host waits for all ranks, but not for a device."""
        stack: Any = self.all_gather(torch.tensor([numbers], device="cpu"), Axis(self.world_size, 1), 0)
        return stack.tolist()

    def start_all_gather(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """`all_gather`, not waited for."""
        if axis.size == 1:
            return _unmoved(x)
        return self.start_gather_stack(x, axis).then(lambda stack: merge_stack(stack, dim % x.ndim))

    def start_gather_stack(self, x: Tensor, axis: Axis) -> Handle:
        """The members' `x`, ``[size, ...]``, in coordinate order, not waited for; `axis` has several."""
        return self._begin(
            "all_gather", axis, x.nbytes * axis.size, lambda: self._start_gather(x.detach().contiguous(), axis)
        )

    def start_reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """`reduce_scatter`, not waited for."""
        if axis.size == 1:
            return _unmoved(x)
        return self.start_scatter_stack(split_stack(x.detach(), axis.size, dim % x.ndim), axis)

    def start_scatter_stack(self, stack: Tensor, axis: Axis) -> Handle:
        """This coordinate's entry of the sum of the members' contiguous ``[size, ...]``, not waited for."""
        return self._begin("reduce_scatter", axis, stack.nbytes, lambda: self._start_scatter_sum(stack, axis))

    def start_all_reduce(self, x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Handle:
        """`all_reduce`, not waited for."""
        if axis.size == 1:
            return _unmoved(x)
        return self._begin("all_reduce", axis, x.nbytes, lambda: self._start_reduce(x.detach().contiguous(), axis, op))

    def start_all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Handle:
        """`all_to_all`, not waited for."""
        if axis.size == 1:
            return _unmoved(x)
        stack = split_stack(x.detach(), axis.size, split_dim % x.ndim)
        exchanged = self._begin("all_to_all", axis, x.nbytes, lambda: self._start_exchange(stack, axis))
        return exchanged.then(lambda got: merge_stack(got, concat_dim % x.ndim))

    def start_exchange_rows(self, x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> Handle:
        """Start an all-to-all of unequal numbers of rows (dim 0).

        The first ``sent[0]`` rows of `x` go to coordinate 0, the next ``sent[1]`` to coordinate 1 and so on; the result
        has ``received[0]`` rows from coordinate 0 first.  Each rank must know how many rows the others send to it.
        """
        if axis.size == 1:
            return _unmoved(x)
        return self._begin(
            "all_to_all", axis, x.nbytes,
            lambda: self._start_exchange_rows(x.detach().contiguous(), axis, tuple(sent), tuple(received)),
        )  # fmt: skip

    def start_broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Handle:
        """`broadcast`, not waited for."""
        if axis.size == 1:
            return _unmoved(x)
        return self._begin(
            "broadcast", axis, x.nbytes, lambda: self._start_broadcast(x.detach().contiguous(), axis, source)
        )

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        """Send `x` to coordinate `to`, whose next receive from here along `axis` gets it.

        No other member takes part.  Two ranks must start the messages between them in one order, those of both
        directions together (with NCCL they run one after the other).  `x` must not be written to until the handle has
        been waited for, which must happen some time; its result is `x`.
        """
        self._check_peer(axis, to)
        return self._begin("send", axis, x.nbytes, lambda: self._start_send(x.detach().contiguous(), axis, to))

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        """Receive what coordinate `source` sends here next along `axis`, of that shape and dtype."""
        self._check_peer(axis, source)
        return self._guard("receive", axis, lambda: self._start_receive(tuple(shape), dtype, axis, source))

    def start_permute(self, x: Tensor, axis: Axis, to: int, source: int) -> Handle:
        """Send `x` to coordinate `to` and receive the `x` of coordinate `source`, of the same shape and dtype, at once.

        All members take part, and together they say who sends to whom; who sends to itself keeps what it has.  It
        counts as one send.
        """
        return self._begin(
            "send", axis, x.nbytes, lambda: self._start_permute(x.detach().contiguous(), axis, to, source)
        )

    def _check_peer(self, axis: Axis, coordinate: int) -> None:
        if not 0 <= coordinate < axis.size or coordinate == axis.coordinate(self.rank):
            raise ValueError(
                f"rank {self.rank}, coordinate {axis.coordinate(self.rank)} of {axis}, can't exchange messages with "
                f"coordinate {coordinate}"
            )

    def _note(self, kind: str, axis: Axis, num_bytes: int) -> None:
        self.note([Collective(kind, axis, num_bytes)])

    def _begin(self, kind: str, axis: Axis, num_bytes: int, start: Callable[[], Handle]) -> Handle:
        """Note a collective, and start it."""
        self._note(kind, axis, num_bytes)
        if self._watch is None:
            return self._guard(kind, axis, start)
        return self._watch(Collective(kind, axis, num_bytes), self._purpose)(self._guard(kind, axis, start))


class TracedCommunicator(Communicator, ABC):
    """Whose collectives become ops of the graph that is traced."""

    @abstractmethod
    def collectives_in(self, module: torch.fx.GraphModule) -> tuple[Collective, ...]:
        """What a graph that was traced with this communicator runs, each time."""


def _unmoved(x: Tensor) -> Handle:
    return Handle(x.detach().contiguous)
