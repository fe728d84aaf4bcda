"""What all communicators share: the record of collectives, handles, and stacking along any tensor dim.

A backend moves *stacked* buffers only, whose leading dim is the coordinate on the axis; here that leading dim
is cut out of, or merged into, any dim of a tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autopar.lower.communication.call_consensus import CallConsensus
from autopar.placement import Axis

__all__ = [
    "BaseCommunicator",
    "Collective",
    "Handle",
    "ReduceOp",
    "TracedCommunicator",
    "Watch",
    "merge_stack",
    "reduce_stack",
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


class BaseCommunicator(ABC):
    """Dims, record and no-op cases of a communicator; a backend adds the transport of stacked buffers."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        """`rank` is logical: the position among the ranks that the program runs on."""
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._records: list[list[Collective]] = []
        self._watch: Watch | None = None
        self._purpose = ("", "")
        self.calls: CallConsensus | None = None

    @property
    def rank(self) -> int:
        """See `Communicator.rank`."""
        return self._rank

    @property
    def world_size(self) -> int:
        """See `Communicator.world_size`."""
        return self._world_size

    @property
    def device(self) -> torch.device:
        """See `Communicator.device`."""
        return self._device

    @contextmanager
    def recording(self) -> Generator[list[Collective]]:
        """See `Communicator.recording`; contexts nest, and each sees all collectives inside it."""
        record: list[Collective] = []
        self._records.append(record)
        try:
            yield record
        finally:
            # by identity: two records may be equal
            self._records = [other for other in self._records if other is not record]

    @contextmanager
    def watching(self, watch: Watch) -> Generator[None]:
        """See `Communicator.watching`."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    @contextmanager
    def serving(self, category: str, layer: str) -> Generator[None]:
        """See `Communicator.serving`."""
        before, self._purpose = self._purpose, (category, layer)
        try:
            yield
        finally:
            self._purpose = before

    def traced(self) -> TracedCommunicator:
        """See `Communicator.traced`."""
        raise NotImplementedError(f"{type(self).__name__} can't be part of a compiled program")

    def note(self, collectives: Iterable[Collective]) -> None:
        """See `Communicator.note`."""
        for record in self._records:
            record.extend(collectives)

    def all_gather(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """See `Communicator.all_gather`."""
        return self.start_all_gather(x, axis, dim).wait()

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """See `Communicator.reduce_scatter`."""
        return self.start_reduce_scatter(x, axis, dim).wait()

    def all_reduce(self, x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Tensor:
        """See `Communicator.all_reduce`."""
        return self.start_all_reduce(x, axis, op).wait()

    def all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        """See `Communicator.all_to_all`."""
        return self.start_all_to_all(x, axis, split_dim, concat_dim).wait()

    def broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Tensor:
        """See `Communicator.broadcast`."""
        return self.start_broadcast(x, axis, source).wait()

    def start_all_gather(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """See `Communicator.all_gather`."""
        if axis.size == 1:
            return _unmoved(x)
        gathered = self._begin(
            "all_gather", axis, x.nbytes * axis.size, lambda: self._start_gather(x.detach().contiguous(), axis)
        )
        return gathered.then(lambda stack: merge_stack(stack, dim % x.ndim))

    def start_reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Handle:
        """See `Communicator.reduce_scatter`."""
        if axis.size == 1:
            return _unmoved(x)
        stack = split_stack(x.detach(), axis.size, dim % x.ndim)
        return self._begin("reduce_scatter", axis, x.nbytes, lambda: self._start_scatter_sum(stack, axis))

    def start_all_reduce(self, x: Tensor, axis: Axis, op: ReduceOp = "sum") -> Handle:
        """See `Communicator.all_reduce`."""
        if axis.size == 1:
            return _unmoved(x)
        return self._begin("all_reduce", axis, x.nbytes, lambda: self._start_reduce(x.detach().contiguous(), axis, op))

    def start_all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Handle:
        """See `Communicator.all_to_all`."""
        if axis.size == 1:
            return _unmoved(x)
        stack = split_stack(x.detach(), axis.size, split_dim % x.ndim)
        exchanged = self._begin("all_to_all", axis, x.nbytes, lambda: self._start_exchange(stack, axis))
        return exchanged.then(lambda got: merge_stack(got, concat_dim % x.ndim))

    def start_broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Handle:
        """See `Communicator.broadcast`."""
        if axis.size == 1:
            return _unmoved(x)
        return self._begin(
            "broadcast", axis, x.nbytes, lambda: self._start_broadcast(x.detach().contiguous(), axis, source)
        )

    def start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        """See `Communicator.start_send`."""
        self._check_peer(axis, to)
        return self._begin("send", axis, x.nbytes, lambda: self._start_send(x.detach().contiguous(), axis, to))

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        """See `Communicator.start_receive`."""
        self._check_peer(axis, source)
        return self._guard("receive", axis, lambda: self._start_receive(tuple(shape), dtype, axis, source))

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

    def _guard(self, kind: str, axis: Axis, start: Callable[[], Handle]) -> Handle:
        """Start a collective, of which a backend may say more where it fails."""
        return start()

    @abstractmethod
    def prepare(self, axes: Iterable[Axis]) -> None:
        """See `Communicator.prepare`."""

    @abstractmethod
    def _start_gather(self, x: Tensor, axis: Axis) -> Handle:
        """``[...] -> [size, ...]``, the members' tensors in coordinate order."""

    @abstractmethod
    def _start_scatter_sum(self, stack: Tensor, axis: Axis) -> Handle:
        """``[size, ...] -> [...]``, this coordinate's entry of the sum of the members' stacks."""

    @abstractmethod
    def _start_reduce(self, x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
        """``[...] -> [...]``, reduced over the members; must not write to `x`."""

    @abstractmethod
    def _start_exchange(self, stack: Tensor, axis: Axis) -> Handle:
        """``[size, ...] -> [size, ...]``, entry c to and from coordinate c."""

    @abstractmethod
    def _start_broadcast(self, x: Tensor, axis: Axis, source: int) -> Handle:
        """``[...] -> [...]``, the tensor of coordinate `source`; must not write to `x`."""

    @abstractmethod
    def _start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        """Send `x` to coordinate `to`; keeps it until it is sent, also if nobody keeps the handle."""

    @abstractmethod
    def _start_receive(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        """``[...]``, what coordinate `source` sends next."""


class TracedCommunicator(BaseCommunicator):
    """Whose collectives become ops of the graph that is traced."""

    @abstractmethod
    def collectives_in(self, module: torch.fx.GraphModule) -> tuple[Collective, ...]:
        """What a graph that was traced with this communicator runs, each time."""


def _unmoved(x: Tensor) -> Handle:
    return Handle(x.detach().contiguous)
