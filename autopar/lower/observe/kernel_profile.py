"""Seconds of the kernels of each layer in a step, by `torch.profiler`.

The profiler says when each kernel ran, the stopwatch which layer was at work then.  Watching every op takes time, so
the profiled step is one of its own, after those that are measured: only shares of its seconds mean something.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from autopar.timeline import Event, StepTimeline

__all__ = ["KernelTime", "profile_kernels"]

_BEGIN = "autopar: the step begins"


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel (on a CPU: of one op, without what it calls) in one layer's forwards or backwards.

    Args:
        layer: index of the layer.
        category: ``"forward"`` or ``"backward"``.
        name: as the profiler calls it.
        seconds: of all runs.
        runs: how many.
    """

    layer: int
    category: str
    name: str
    seconds: float
    runs: int


def profile_kernels(step: Callable[[], StepTimeline], device: torch.device) -> tuple[KernelTime, ...]:
    """The kernels of a step that a stopwatch measures, those that take longest first.

    Args:
        step: runs it, and gives what the stopwatch saw.
        device: of this rank.
    """
    is_accelerator = device.type != "cpu"
    activities = supported_activities() if is_accelerator else {ProfilerActivity.CPU}
    with profile(activities=activities) as profiler:
        with record_function(_BEGIN):
            pass
        timeline = step()
    events = cast("list[Any]", profiler.events())
    begin_us = next(event.time_range.start for event in events if event.name == _BEGIN)
    results = [
        (
            str(event.name),
            (float(event.time_range.start) - begin_us) / 1e6,
            _seconds(event, is_accelerator=is_accelerator),
        )
        for event in events
        if (event.device_type.name != "CPU") == is_accelerator and event.name != _BEGIN
    ]
    return _by_layer(results, timeline.events)


def _seconds(event: Any, *, is_accelerator: bool) -> float:
    return float(event.time_range.elapsed_us() if is_accelerator else event.self_cpu_time_total) / 1e6


def _by_layer(runs: Sequence[tuple[str, float, float]], events: Sequence[Event]) -> tuple[KernelTime, ...]:
    """Runs (name, start, seconds) by the layer that computes when they start; what no layer starts is left out."""
    computing = sorted((e for e in events if e.stream == "compute" and e.layer >= 0), key=lambda e: e.start_s)
    starts = [event.start_s for event in computing]
    total: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, start_s, seconds in runs:
        place = bisect_right(starts, start_s) - 1
        if place >= 0 and start_s < computing[place].stop_s:
            row = total[computing[place].layer, computing[place].category, name]
            row[0] += seconds
            row[1] += 1
    kernels = [KernelTime(*key, seconds, int(count)) for key, (seconds, count) in total.items()]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))
