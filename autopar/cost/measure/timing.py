"""Times a call, on the clock of the device that runs it.

On a GPU seconds pass between two events of the current stream.  On a CPU a call that talks to nobody takes the seconds
that its own thread works (`own_s`), so that other programs don't count; one that waits for other ranks those that pass
(`elapsed_s`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from autopar.cost.measure.probe import Sample

__all__ = ["LEAST_S", "elapsed_s", "median_of", "own_s", "sample", "synchronize", "warm_up"]

_MIN_REPEATS, _MAX_REPEATS = 2, 50
_BATCH_S, _BATCH = 2e-4, 64  # short calls are timed so many at once: a clock takes up to a microsecond itself
_WARM_UP_S = 0.5  # after which the clocks of all GPUs that were looked at are up
LEAST_S = 1e-8
"""Nothing takes less: what differences of two times leave of the smallest ops is noise."""


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def warm_up(device: torch.device) -> None:
    """Keep a GPU busy until its clocks are up and its libraries are loaded; a CPU needs none of it."""
    if device.type == "cpu":
        return
    x = torch.ones((4096, 4096), device=device)
    started = time.perf_counter()
    while time.perf_counter() - started < _WARM_UP_S:
        x = torch.mm(x, x).clamp_(-1, 1)
        torch.accelerator.synchronize(device)


def median_of(times: Sequence[float]) -> Sample:
    """Median and spread of `times`, in seconds."""
    median = max(statistics.median(times), LEAST_S)
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return Sample(median, (high - low) / median)


def sample(run: Callable[[], object], device: torch.device, budget_s: float) -> Sample:
    """Time `run` with `own_s` until `budget_s` is spent: 2 to 50 times, after a call that warms up."""
    run()
    until_s = time.perf_counter() + budget_s
    batch = max(1, min(_BATCH, int(_BATCH_S / max(own_s(run, device), 1e-9))))

    def run_all() -> None:
        for _ in range(batch):
            run()

    times: list[float] = []
    while len(times) < _MAX_REPEATS and (time.perf_counter() < until_s or len(times) < _MIN_REPEATS):
        times.append(own_s(run_all, device) / batch)
    return median_of(times)


def elapsed_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that pass on `device` from the start of what `run` asks of it to its end.

    On a GPU between two events of the current stream, so that neither the host's wake-up after a wait counts, nor what
    other streams still do: whoever wants that waits for it in `run`.
    """
    if device.type != "cpu":
        return _between_events_s(run, device)
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def own_s(run: Callable[[], object], device: torch.device) -> float:
    """As `elapsed_s`, but on a CPU the seconds that this thread works."""
    if device.type != "cpu":
        return _between_events_s(run, device)
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _between_events_s(run: Callable[[], object], device: torch.device) -> float:
    before, after = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    torch.accelerator.synchronize(device)
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
