"""Median times of a call, with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Sample", "median_of", "sample", "synchronize"]

_MAX_REPEATS = 50
_MIN_REPEATS = 3


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
    """Median and spread of `times`, which holds two or more."""
    median = max(statistics.median(times), 1e-9)
    low, _, high = statistics.quantiles(times, n=4)
    return Sample(median, (high - low) / median)


def sample(run: Callable[[], object], device: torch.device, budget_s: float) -> Sample:
    """Time `run` until `budget_s` is spent: at least 3 times, at most 50, after one call to warm up.

    Short calls are timed in batches, so that the clock and the wait for the device don't count.
    """
    run()
    once_s = _time(run, 1, device)
    batch = max(1, min(64, int(2e-4 / max(once_s, 1e-9))))
    times = [_time(run, batch, device)]
    repeats = int(budget_s / max(times[0] * batch, 1e-9))
    times += [_time(run, batch, device) for _ in range(min(_MAX_REPEATS, max(_MIN_REPEATS, repeats)))]
    return median_of(times)


def _time(run: Callable[[], object], batch: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(batch):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / batch
