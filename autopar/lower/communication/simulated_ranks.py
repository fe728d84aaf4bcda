"""All ranks in one process: every rank is a thread, collectives are meetings of threads.

Used to rehearse programs without a cluster.  Results are deterministic: sums run in coordinate order, and no rank sees
another's tensor after the meeting.  Messages wait in mailboxes until they are received, so no sender waits.  What would
hang a cluster raises here: members that come to a meeting with different collectives, ranks that all wait for one
who never comes or sends, and messages that nobody receives.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from autopar.lower.communication.collectives import Handle, ReduceOp, reduce_stack
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.idle_threads import IdleThreads
from autopar.placement import Axis

__all__ = ["CollectiveMismatchError", "ThreadCommunicator", "simulate"]

T = TypeVar("T")


class CollectiveMismatchError(RuntimeError):
    """Ranks do not agree on the next collective; on a cluster this would hang or mix up data."""


class _AbortedError(BaseException):
    """Unwinds a rank after another one failed.  Not an Exception, so that no handler on the way keeps it."""


@dataclass
class _Meeting:
    """A collective that members arrive at; complete when all of its group have."""

    group: tuple[int, ...]
    what: dict[int, str] = field(default_factory=dict[int, str])
    brought: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def is_complete(self) -> bool:
        return len(self.brought) == len(self.group)


@dataclass
class _Mailbox:
    """What one rank sends to another along one axis: receive number n gets message number n."""

    messages: dict[int, tuple[str, Tensor]] = field(default_factory=dict[int, tuple[str, Tensor]])
    num_sent: int = 0
    num_receives: int = 0
    awaited: int = -1  # the message for which the receiver waits


class _Road(NamedTuple):
    """Which mailbox: messages of `source` to `to` along `axis`."""

    axis: Axis
    source: int
    to: int


class _Room:
    """Where the ranks of one simulation meet.  Every field is guarded by `changed`."""

    def __init__(self, world_size: int, deadline_s: float) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.changed = threading.Condition()
        self.open: dict[tuple[int, ...], _Meeting] = {}
        self.mailboxes: dict[_Road, _Mailbox] = {}
        self.waiting: dict[int, str] = {}  # rank -> what for
        self.done: set[int] = set()
        self.error: BaseException | None = None
        self.making = threading.Lock()
        self.made: dict[Hashable, Any] = {}  # guarded by `making`

    def meet(self, rank: int, group: tuple[int, ...], what: str, x: Tensor) -> list[Tensor]:
        """Bring `x`, wait for the others of `group`, get everybody's tensor by coordinate (read only)."""
        brought = x.clone()  # the rank may overwrite x while others still read
        with self.changed:
            self.check()
            meeting = self.open.setdefault(group, _Meeting(group))
            self._compare(meeting, rank, what)
            meeting.what[rank] = what
            meeting.brought[rank] = brought
            if meeting.is_complete:
                del self.open[group]
                for member in group:
                    self.waiting.pop(member, None)
                self.changed.notify_all()
            else:
                self.waiting[rank] = f"{what} with ranks {group}"
                self.check_stuck()
                while not meeting.is_complete:
                    self._wait()
        return [meeting.brought[member] for member in group]

    def send(self, road: _Road, what: str, x: Tensor) -> None:
        """Leave a copy of `x` in the mailbox."""
        copy = x.clone()
        with self.changed:
            self.check()
            mailbox = self.mailboxes.setdefault(road, _Mailbox())
            mailbox.messages[mailbox.num_sent] = (what, copy)
            if mailbox.awaited == mailbox.num_sent:
                self.waiting.pop(road.to)
                self.changed.notify_all()
            mailbox.num_sent += 1

    def start_receive(self, road: _Road) -> int:
        """The number of the message that this receive will get."""
        with self.changed:
            mailbox = self.mailboxes.setdefault(road, _Mailbox())
            mailbox.num_receives += 1
            return mailbox.num_receives - 1

    def receive(self, road: _Road, number: int, what: str) -> Tensor:
        """Wait for message `number`, and take it out."""
        with self.changed:
            self.check()
            mailbox = self.mailboxes[road]
            if number not in mailbox.messages:
                mailbox.awaited = number
                self.waiting[road.to] = f"a receive of {what} from rank {road.source}"
                self.check_stuck()
                while number not in mailbox.messages:
                    self._wait()
            sent, x = mailbox.messages.pop(number)
            if sent != what:
                self.fail(
                    CollectiveMismatchError(f"rank {road.source} sends {sent}, rank {road.to} receives {what} from it")
                )
            return x

    def check_mailboxes(self) -> None:
        """Fail when a message was sent for which no receive was started."""
        for road, mailbox in self.mailboxes.items():
            if mailbox.num_sent > mailbox.num_receives:
                what, _ = mailbox.messages[mailbox.num_receives]
                self.fail(
                    CollectiveMismatchError(f"rank {road.source} sends {what}, which rank {road.to} never receives")
                )

    def _wait(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            self.fail(TimeoutError(f"simulated ranks ran out of time; {self.describe()}"))
        self.check()
        self.changed.wait(left_s)
        self.check()

    def _compare(self, meeting: _Meeting, rank: int, what: str) -> None:
        for other, expected in meeting.what.items():
            if expected != what:
                self.fail(
                    CollectiveMismatchError(
                        f"ranks {meeting.group} meet with different collectives: "
                        f"rank {other} runs {expected}, rank {rank} runs {what}"
                    )
                )
            return

    def check_stuck(self) -> None:
        """Fail when every rank waits or has returned: nobody is left who could complete a meeting or send."""
        if self.waiting and len(self.waiting) + len(self.done) == self.world_size:
            self.fail(CollectiveMismatchError(f"every rank waits for another that never comes; {self.describe()}"))
        if len(self.done) == self.world_size:
            self.check_mailboxes()

    def describe(self) -> str:
        """Where each rank stands."""
        lines: list[str] = []
        for rank in range(self.world_size):
            if rank in self.waiting:
                lines.append(f"rank {rank} waits in {self.waiting[rank]}")
            else:
                lines.append(f"rank {rank} {'has returned' if rank in self.done else 'is computing'}")
        return "; ".join(lines)

    def fail(self, error: BaseException) -> None:
        """Make `error` the simulation's error (the first one stays), wake everybody, and unwind this rank."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.changed.notify_all()
        raise _AbortedError

    def check(self) -> None:
        """Unwind this rank if another one has failed."""
        if self.error is not None:
            raise _AbortedError


class ThreadCommunicator(Communicator):
    """The communicator of one simulated rank; `simulate` makes them.  ``start_*`` meets at once."""

    def __init__(self, rank: int, room: _Room, device: torch.device) -> None:
        """`room` is shared by the ranks of one simulation."""
        super().__init__(rank, room.world_size, device)
        self._room = room

    def made_once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What the first rank's `make` returned."""
        with self._room.making:
            if key not in self._room.made:
                self._room.made[key] = make()
            return cast("T", self._room.made[key])

    def _start_send(self, x: Tensor, axis: Axis, to: int) -> Handle:
        road = _Road(axis, self.rank, axis.group(self.rank)[to])
        self._room.send(road, f"{_describe(x.shape, x.dtype)} on {axis}", x)
        return _ready(x)

    def _start_receive(self, shape: tuple[int, ...], dtype: torch.dtype, axis: Axis, source: int) -> Handle:
        road = _Road(axis, axis.group(self.rank)[source], self.rank)
        number = self._room.start_receive(road)
        return Handle(lambda: self._room.receive(road, number, f"{_describe(shape, dtype)} on {axis}"))

    def _meet(self, kind: str, axis: Axis, x: Tensor) -> list[Tensor]:
        what = f"{kind} of {_describe(x.shape, x.dtype)} on {axis}"
        return self._room.meet(self.rank, axis.group(self.rank), what, x)

    def _start_gather(self, x: Tensor, axis: Axis) -> Handle:
        return _ready(torch.stack(self._meet("all_gather", axis, x)))

    def _start_scatter_sum(self, stack: Tensor, axis: Axis) -> Handle:
        coordinate = axis.coordinate(self.rank)
        stacks = self._meet("reduce_scatter", axis, stack)
        return _ready(reduce_stack(torch.stack([other[coordinate] for other in stacks]), "sum"))

    def _start_reduce(self, x: Tensor, axis: Axis, op: ReduceOp) -> Handle:
        return _ready(reduce_stack(torch.stack(self._meet(f"all_reduce ({op})", axis, x)), op))

    def _start_exchange(self, stack: Tensor, axis: Axis) -> Handle:
        coordinate = axis.coordinate(self.rank)
        return _ready(torch.stack([other[coordinate] for other in self._meet("all_to_all", axis, stack)]))

    def _start_broadcast(self, x: Tensor, axis: Axis, source: int) -> Handle:
        return _ready(self._meet(f"broadcast (from {source})", axis, x)[source].clone())


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _ready(x: Tensor) -> Handle:
    return Handle(lambda: x, is_done=lambda: True)


@cache
def _choose_kernels() -> None:
    """Let the first call of MKL's vector functions, which chooses their kernels, be that of one thread.

    Of threads that make it at the same time one may get results of a lower accuracy: square roots, 2e-11 beside, in 4
    of 12,000 calls (torch 2.13.0, CPU).
    """
    torch.ones(1, dtype=torch.float64).sqrt()


def simulate(
    world_size: int,
    fn: Callable[[ThreadCommunicator], T],
    timeout_s: float = 120,
    device: torch.device | str = "cpu",
) -> list[T]:
    """Run ``fn(communicator)`` for all ranks at once, each in a thread; returns the results by rank.

    The threads inherit whether gradients are enabled.

    Raises:
        CollectiveMismatchError: ranks met with different collectives, or all wait for one that never comes, or a
            message differs from what its receiver wants or has none.
        TimeoutError: not finished after `timeout_s`.
        BaseException: what `fn` raised on the first rank that failed, with a note naming that rank.

    Example:
        >>> simulate(2, lambda c: c.all_reduce(torch.tensor(c.rank + 1), Axis(2, 1)).item())
        [3, 3]
    """
    _choose_kernels()
    room = _Room(world_size, time.monotonic() + timeout_s)
    results: dict[int, T] = {}
    grad_enabled = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            # Of an accelerator, autograd has one thread for all who call it: a rank that waits in its backward for
            # another's would wait for itself.
            with torch.set_grad_enabled(grad_enabled), torch.autograd.set_multithreading_enabled(mode=False):
                results[rank] = fn(ThreadCommunicator(rank, room, torch.device(device)))
            with room.changed:
                room.done.add(rank)
                room.check_stuck()
        except _AbortedError:
            pass
        except BaseException as error:  # noqa: BLE001  (whatever it is, it belongs to the caller)
            error.add_note(f"raised on simulated rank {rank} of {world_size}")
            _fail_quietly(room, error)

    _join([_THREADS[rank].start(partial(run, rank)) for rank in range(world_size)], room)
    if room.error is not None:
        error, room.error = room.error, _AbortedError()  # which holds no frames
        # Tensors saved for backward hold the room, and the error's frames hold them, by ways that no collector sees.
        raise error
    return [results[rank] for rank in range(world_size)]


# Threads of a rank stay for the next simulation, as its process does, because DTensor remembers what it knows of each
# op by thread: to learn it again is most of what a small optimizer's steps cost.
_THREADS: defaultdict[int, IdleThreads] = defaultdict(IdleThreads)


def _join(ends: list[threading.Event], room: _Room) -> None:
    try:
        for ended in ends:
            ended.wait(max(0.0, room.deadline_s - time.monotonic()))
    except BaseException as error:
        _fail_quietly(room, error)  # an interrupted caller must not leave threads waiting
        raise
    if not all(ended.is_set() for ended in ends) and room.error is None:
        with room.changed:
            where = room.describe()
        _fail_quietly(room, TimeoutError(f"simulated ranks ran out of time; {where}"))


def _fail_quietly(room: _Room, error: BaseException) -> None:
    with suppress(_AbortedError):
        room.fail(error)
