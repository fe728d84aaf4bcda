"""What one training step of this rank holds at most on a CPU, by what torch's profiler says of its allocator.

The profiler tells of memory that is given out and taken back while it runs.  What was there before is known by name:
parameters, buffers, constants, gradients, the batch, the optimizer's state, what the call before returned.  A weak
reference tells when some of that goes.  What else the process holds, such as the caller's data, doesn't count.

The watch lasts from a training call until the optimizers have stepped, at most to the next call.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.lower.compat import AllocationEvent, record_allocations

__all__ = ["AllocationWatch", "OptimizerWatch", "peak_of_events"]

_ONLY_ONE = threading.Lock()  # torch's profiler runs once in a process


class AllocationWatch:
    """Of one step; begun when it is made, where `is_running` says so."""

    def __init__(self, known: Iterable[torch.UntypedStorage]) -> None:
        """`known` is what there is already and counts."""
        self.peak_bytes = 0.0
        self.reason = ""
        self._thread = threading.get_ident()
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._gone: list[AllocationEvent] = []
        self._end: Callable[[], list[AllocationEvent] | None] | None = None
        for storage in known:
            if storage.device.type == "cpu":
                self._know(storage)
        if not _ONLY_ONE.acquire(blocking=False):
            self.reason = "another rank of this process was watched"
            return
        self._end = record_allocations()
        if self._end is None:
            _ONLY_ONE.release()
            self.reason = "another profiler was running"
            return
        # If nobody comes back: the module is given up, or the process ends.
        self._finalizer = weakref.finalize(self, _abandon, self._end, self._thread)

    @property
    def is_running(self) -> bool:
        """Whether it still watches."""
        return self._end is not None

    def stop(self) -> None:
        """End it, and say in `peak_bytes` what was seen; 0: nothing, and `reason` says why."""
        if self._end is None:
            return
        end, self._end = self._end, None
        self._finalizer.detach()
        try:
            events = end() if threading.get_ident() == self._thread else None
        except RuntimeError:  # torch's word for a profiler that isn't there any more
            events = None
        finally:
            _ONLY_ONE.release()
        if events is None:
            self.reason = "another profiler was started, or the step went on in another thread"
            return
        self.peak_bytes = peak_of_events(sum(size for _, size in self._sizes.values()), events, self._gone)

    def _know(self, storage: torch.UntypedStorage) -> None:
        size, gone = storage.nbytes(), self._gone

        def note(_: object) -> None:
            gone.append(AllocationEvent(time.time_ns(), 0, -size))

        self._sizes.setdefault(storage.data_ptr(), (weakref.ref(storage, note), size))


def _abandon(end: Callable[[], object], thread: int) -> None:
    try:
        if threading.get_ident() == thread:
            end()
    except RuntimeError:
        pass
    finally:
        _ONLY_ONE.release()


def peak_of_events(before_bytes: float, events: Sequence[AllocationEvent], gone: Sequence[AllocationEvent]) -> float:
    """The most bytes at any moment.

    Args:
        before_bytes: of what was there at the beginning and counts.
        events: what came and went since, in order of time.
        gone: what went of that which was there (addresses don't matter).
    """
    now = most = before_bytes
    there: dict[int, int] = {}
    leaving = sorted(gone, key=lambda event: -event.time_ns)
    for event in events:
        while leaving and leaving[-1].time_ns <= event.time_ns:
            now += leaving.pop().num_bytes
        # An address that is given out again has come back unseen, in a thread that isn't watched.
        now -= there.pop(event.address, 0)
        if event.num_bytes > 0:
            there[event.address] = event.num_bytes
            now += event.num_bytes
            most = max(most, now)
    return most


class OptimizerWatch:
    """Finds the optimizers that train these parameters, by their steps."""

    def __init__(self, parameters: Iterable[Tensor], on_all_stepped: Callable[[], None]) -> None:
        """`on_all_stepped` is called each time when all of them have been stepped."""
        self._parameters = {id(parameter) for parameter in parameters}
        self._waiting = set(self._parameters)
        self._on_all_stepped = on_all_stepped
        self._found: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        _watch_steps()
        _WATCHES.add(self)

    def remove(self) -> None:
        """Look no further."""
        _WATCHES.discard(self)

    @property
    def is_known(self) -> bool:
        """Whether some optimizer of these parameters was seen."""
        return bool(self._found) or not self._parameters

    def state(self) -> list[Tensor]:
        """What they keep."""
        states = [each for optimizer in self._found for each in optimizer.state.values()]
        return [x for state in states for x in state.values() if isinstance(x, Tensor)]

    def saw_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of whatever parameters, was stepped."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]} & self._parameters
        if not own:
            return
        self._found.add(optimizer)
        self._waiting -= own
        if not self._waiting:
            self._waiting = set(self._parameters)
            self._on_all_stepped()


_WATCHES: weakref.WeakSet[OptimizerWatch] = weakref.WeakSet()


@cache
def _watch_steps() -> None:
    """Once and for all: a hook of its own, that a watch takes away when it has seen enough, would change the hooks
    while an optimizer goes through them."""

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for watch in tuple(_WATCHES):
            watch.saw_step(optimizer)

    register_optimizer_step_post_hook(stepped)
