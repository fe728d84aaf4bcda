"""Times calls on the clock of the device that runs them.

On an accelerator, seconds are measured between two events of the current stream (see `autopar.host.accelerators`).
On a CPU, a call without communication is measured in CPU seconds of its thread (`busy_s`), so that other programs don't
count; one that waits for other ranks is measured in wall-clock seconds (`elapsed_s`).  Ops, which are shorter than
the host needs to launch them, are measured on a device that is told of all of them before it begins (`QueuedTimer`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from autopar.cost.measure.probe import Sample
from autopar.host.accelerators import DeviceClock, times_events

__all__ = ["MIN_S", "QueuedTimer", "busy_s", "elapsed_s", "median_of", "sample", "synchronize", "warm_up"]

_MIN_REPEATS, _MAX_REPEATS = 2, 50
_BATCH_S, _BATCH = 2e-4, 64  # short calls are timed in batches, as reading a clock takes up to a microsecond
_WARM_UP_S = 0.5  # after this time all GPUs that were tried ran at their full clock rate
_AHEAD = 1.5  # how long a device is kept busy while calls are launched, relative to what the last launches took
_MOST_AHEAD_S = 0.02  # calls that wait for the device would otherwise take longer every time
_FILLER_SIDE = 2048  # a product of this side takes a third of a millisecond on an H200
MIN_S = 1e-8
"""A lower bound of all times: the difference of two times of the smallest ops is noise, and may be negative."""


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def warm_up(device: torch.device) -> None:
    """Keep a GPU busy until it runs at its full clock rate and its libraries are loaded; do nothing on a CPU."""
    if device.type == "cpu":
        return
    x = torch.ones((4096, 4096), device=device)
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP_S:
        x = torch.mm(x, x).clamp_(-1, 1)
        torch.accelerator.synchronize(device)


def median_of(times: Sequence[float]) -> Sample:
    """The median and spread of `times`, in seconds."""
    median = max(statistics.median(times), MIN_S)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return Sample(median, (high - low) / median)


class QueuedTimer:
    """Times calls of one kind as a device runs them that is told of all of them before it begins.

    In a training step the host is ahead of a GPU, whose queue is never empty.  Alone, an op takes as long as the host
    needs to launch it, 20 to 100 us on a machine with an H200, where the GPU needs 2 to 40.  So the device first
    gets other work, for longer than the last launches took.  The first call has nothing to go by, and warms up.

    On a CPU, and on devices whose events tell no seconds, it is `busy_s`.
    """

    def __init__(self, device: torch.device) -> None:
        """For calls on this device."""
        self._device = device
        self._launches_s = 0.0

    def __call__(self, run: Callable[[], object]) -> float:
        """The seconds of the work that `run` starts."""
        if not times_events(self._device.type):
            return busy_s(run, self._device)
        filler, filler_s = _filler(self._device)
        torch.accelerator.synchronize(self._device)
        for _ in range(math.ceil(min(_AHEAD * self._launches_s, _MOST_AHEAD_S) / filler_s)):
            torch.mm(filler, filler)
        clock = DeviceClock(self._device)
        started = time.perf_counter()
        run()
        self._launches_s = time.perf_counter() - started
        after = clock.now()
        clock.finished_s()
        return after()


@cache
def _filler(device: torch.device) -> tuple[Tensor, float]:
    """A matrix, and the seconds of its product with itself."""
    x = torch.ones((_FILLER_SIDE, _FILLER_SIDE), device=device)
    return x, max(statistics.median(_on_device_s(lambda: torch.mm(x, x), device) for _ in range(5)), 1e-5)


def sample(run: Callable[[], object], device: torch.device, budget_s: float) -> Sample:
    """Time `run` with a `QueuedTimer` until `budget_s` is spent: 2 to 50 times, after a call that warms up."""
    run()
    until_s = time.perf_counter() + budget_s
    batch = max(1, min(_BATCH, int(_BATCH_S / max(busy_s(run, device), 1e-9))))
    timer = QueuedTimer(device)

    def run_all() -> None:
        for _ in range(batch):
            run()

    timer(run_all)
    times: list[float] = []
    while len(times) < _MAX_REPEATS and (time.perf_counter() < until_s or len(times) < _MIN_REPEATS):
        times.append(timer(run_all) / batch)
    return median_of(times)


def elapsed_s(run: Callable[[], object], device: torch.device) -> float:
    """The seconds from the start to the end of the work that `run` starts on `device`.

    On an accelerator they are measured between two events of the current stream. They include neither the host's
    wake-up after a wait nor work on other streams, unless `run` waits for it.
    """
    if device.type != "cpu":
        return _on_device_s(run, device)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def busy_s(run: Callable[[], object], device: torch.device) -> float:
    """As `elapsed_s`, but on a CPU the CPU seconds of this thread."""
    if device.type != "cpu":
        return _on_device_s(run, device)
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _on_device_s(run: Callable[[], object], device: torch.device) -> float:
    torch.accelerator.synchronize(device)
    clock = DeviceClock(device)
    run()
    after = clock.now()
    clock.finished_s()
    return after()
