"""Median times of a call, with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Contention", "Sample", "median_of", "sample", "synchronize"]

_MAX_REPEATS = 50
_MIN_REPEATS = 3
"""The first of them is not counted."""


@dataclass(frozen=True)
class Sample:
    """A median of seconds, and the distance of the quartiles relative to it."""

    seconds: float
    spread: float


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_of(times: list[float]) -> Sample:
    """Median and spread of `times`."""
    median = max(statistics.median(times), 1e-9)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return Sample(median, (high - low) / median)


def sample(run: Callable[[], object], device: torch.device, budget_s: float) -> Sample:
    """Time `run` until `budget_s` is spent: at least twice, at most 50 times, after one call to warm up.

    Short calls are timed in batches, so that the clock and the wait for the device don't count.
    On a CPU it is this thread's own time.  What sharing the cores costs is a factor over many calls
    (`Contention`): a call shorter than the system's time slice is interrupted never, or
    for many times its length.
    """
    run()
    times = [_time(run, 1, device)]
    batch = max(1, min(64, int(2e-4 / max(times[0], 1e-9))))
    spent_s = times[0]
    while len(times) < _MAX_REPEATS and (spent_s < budget_s or len(times) < _MIN_REPEATS):
        times.append(_time(run, batch, device))
        spent_s += times[-1] * batch
    return median_of(times[1:])


def _time(run: Callable[[], object], batch: int, device: torch.device) -> float:
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    synchronize(device)
    start = clock()
    for _ in range(batch):
        run()
    synchronize(device)
    return (clock() - start) / batch


class Contention:
    """How many seconds pass for each second of this thread's work, between construction and `factor`."""

    def __init__(self, device: torch.device) -> None:
        """Start counting."""
        self._is_shared = device.type == "cpu"
        self._started = time.perf_counter(), time.thread_time()

    def factor(self) -> float:
        """Seconds per second of work since then, at least 1.0; 1.0 on devices that ranks don't share."""
        passed_s = time.perf_counter() - self._started[0]
        worked_s = time.thread_time() - self._started[1]
        return max(1.0, passed_s / worked_s) if self._is_shared and worked_s > 0 else 1.0
