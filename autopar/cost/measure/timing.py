"""Median times of a call, with their spread."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = [
    "LEAST_S",
    "Contention",
    "Sample",
    "contention_now",
    "elapsed_s",
    "mean_of",
    "median_of",
    "sample",
    "synchronize",
    "warm_up",
]

_MAX_REPEATS = 50
_MIN_REPEATS = 2
_WARM_UP_S = 0.5
_MOMENT_S = 0.05
LEAST_S = 1e-6
"""Nothing takes less: a clock and a scheduler leave no more of a difference of two times."""


@dataclass(frozen=True)
class Sample:
    """A median of seconds, and the distance of the quartiles relative to it."""

    seconds: float
    spread: float


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(device: torch.device) -> None:
    """Keep a GPU busy until its clocks are up and its libraries are loaded; a CPU needs none of it."""
    if device.type != "cuda":
        return
    x = torch.ones((4096, 4096), device=device)
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP_S:
        x = torch.mm(x, x).clamp_(-1, 1)
        torch.cuda.synchronize(device)


def median_of(times: list[float]) -> Sample:
    """Median and spread of `times`."""
    median = max(statistics.median(times), 1e-9)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return Sample(median, (high - low) / median)


def mean_of(times: list[float]) -> Sample:
    """Mean of `times` without the slowest tenth, and how far it may be off: their spread over the root of their
    number."""
    mean = max(statistics.fmean(sorted(times)[: math.ceil(0.9 * len(times))]), LEAST_S)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (mean, mean, mean)
    return Sample(mean, (high - low) / mean / math.sqrt(len(times)))


def sample(run: Callable[[], object], device: torch.device, budget_s: float) -> Sample:
    """Time `run` until `budget_s` is spent: at least twice, at most 50 times, after one call to warm up.

    Short calls are timed in batches, so that the clock and the wait for the device don't count.
    On a CPU it is this thread's own time.  What sharing the cores costs is a factor over many calls
    (`Contention`): a call shorter than the system's time slice is interrupted never, or
    for many times its length.
    """
    run()
    until_s = time.perf_counter() + budget_s
    first_s = _time(run, 1, device)
    batch = max(1, min(64, int(2e-4 / max(first_s, 1e-9))))
    times: list[float] = []
    while len(times) < _MAX_REPEATS and (time.perf_counter() < until_s or len(times) < _MIN_REPEATS):
        times.append(_time(run, batch, device))
    return median_of(times)


def elapsed_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that pass on `device` from the start of what `run` asks of it to its end.

    On a GPU between two events of the current stream, so that neither the host's wake-up after a wait counts, nor what
    other streams still do: whoever wants that waits for it in `run`.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def _time(run: Callable[[], object], batch: int, device: torch.device) -> float:
    def run_all() -> None:
        for _ in range(batch):
            run()

    if device.type == "cuda":
        return elapsed_s(run_all, device) / batch
    start = time.thread_time()
    run_all()
    return (time.thread_time() - start) / batch


class Contention:
    """How many seconds pass for each second of this thread's work."""

    def __init__(self, device: torch.device) -> None:
        """Nothing has been counted yet."""
        self._is_shared = device.type == "cpu"
        self._passed_s = 0.0
        self._worked_s = 0.0

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count what happens inside, in which this thread doesn't wait for anything but a core."""
        passed_s, worked_s = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self._passed_s += time.perf_counter() - passed_s
            self._worked_s += time.thread_time() - worked_s

    def factor(self) -> float:
        """Seconds per second of work so far, at least 1.0; 1.0 on devices that ranks don't share."""
        return max(1.0, self._passed_s / self._worked_s) if self._is_shared and self._worked_s > 0 else 1.0


def contention_now(device: torch.device) -> float:
    """`Contention.factor` of a moment's work."""
    contention = Contention(device)
    with contention.counting():
        deadline = time.perf_counter() + _MOMENT_S
        while time.perf_counter() < deadline:
            math.sqrt(2.0)
    return contention.factor()
