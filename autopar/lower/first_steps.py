"""The first training steps of a parallel module, beside what its plan says of them.

A step lasts from one training call of the module to the next, optimizer and data included.  The first one warms up; the
second and third are timed, and their peak memory is what CUDA's allocator says.  On CPU there is no allocator to ask,
and the size of the process says little about one step: there only the time is compared.  Nothing communicates, nothing
waits for a device: on GPUs events are recorded, and read when they have passed.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autopar.plan import Plan

__all__ = ["FirstSteps", "StepComparison"]

_LOGGER = logging.getLogger("autopar")
_MARKS = 4  # the beginnings of steps 1 to 4

Report = Callable[["StepComparison"], None]


@dataclass(frozen=True)
class StepComparison:
    """A real step of this rank beside its prediction.

    Args:
        predicted_s: seconds that the plan promised.
        measured_s: seconds from one call to the next, the mean of two steps.
        spread: difference of the two over their mean.
        predicted_bytes: peak that the plan promised for this rank's device group.
        measured_bytes: peak that was allocated on this device; 0: not known (CPU).
        step_time_error: how far the plan said that its step time can be off; 0: it did not.
        memory_error: the same of the peak.
    """

    predicted_s: float
    measured_s: float
    spread: float
    predicted_bytes: float
    measured_bytes: float
    step_time_error: float
    memory_error: float

    @property
    def is_slow(self) -> bool:
        """Whether the step took longer than the plan's error bar allows."""
        return bool(self.step_time_error) and self.measured_s > self.predicted_s * (1 + self.step_time_error)

    @property
    def is_large(self) -> bool:
        """Whether the peak is above the plan's error bar."""
        return bool(self.memory_error) and self.measured_bytes > self.predicted_bytes * (1 + self.memory_error)

    def __str__(self) -> str:
        """One line, and one for each error bar that does not hold, with what to do."""
        text = f"step: {self.measured_s * 1e3:.4g} ms, predicted {self.predicted_s * 1e3:.4g} ms"
        text += f" +- {self.step_time_error:.0%}" if self.step_time_error else ""
        if self.measured_bytes:
            text += f"; peak: {self.measured_bytes / 2**30:.4g} GiB, predicted {self.predicted_bytes / 2**30:.4g} GiB"
            text += f" +- {self.memory_error:.0%}" if self.memory_error else ""
        if self.is_slow:
            text += (
                "\nThe step is slower than the plan's error bar: is the machine shared, the input late? Measure it "
                "again with `python -m autopar.profile`; `print(model.report())` shows where the time goes"
            )
        if self.is_large:
            text += (
                "\nThe peak is above the plan's error bar: other tensors on the device, or held outputs? The next plan "
                "for this machine counts it in; until then pass a smaller `memory=` to parallelize"
            )
        return text


class FirstSteps:
    """Watches a module's first training calls; afterwards it does nothing."""

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        """Nothing is seen yet; `report` is told once, on rank 0, what was."""
        self.seen: StepComparison | None = None
        self.report: Report | None = None
        self._plan = plan
        self._rank = rank
        self._device = device
        self._times_s: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._is_over = False

    def interrupt(self) -> None:
        """Another call than a training one came between: begin anew."""
        self._times_s.clear()
        self._events.clear()

    def begin_step(self) -> None:
        """A training call begins."""
        if self._is_over:
            return
        if self._device.type != "cuda":
            self._times_s.append(time.perf_counter())
            if len(self._times_s) == _MARKS:
                self._compare([after - before for before, after in itertools.pairwise(self._times_s)])
        elif len(self._events) < _MARKS:
            if len(self._events) == 1:
                torch.cuda.reset_peak_memory_stats(self._device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        elif self._events[-1].query():
            self._compare([before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events)])

    def _compare(self, steps_s: list[float]) -> None:
        self._is_over = True
        self.interrupt()
        plan = self._plan
        _, second, third = steps_s
        mean = (second + third) / 2
        own = [s.peak_memory_bytes for s in plan.stages if s.group == self._rank // plan.group_size]
        self.seen = StepComparison(
            predicted_s=plan.step_time_s,
            measured_s=mean,
            spread=abs(second - third) / mean if mean else 0.0,
            predicted_bytes=own[0] if own else plan.peak_memory_bytes,
            measured_bytes=float(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else 0.0,
            step_time_error=plan.step_time_error,
            memory_error=plan.memory_error,
        )
        if self._rank == 0:
            level = logging.WARNING if self.seen.is_slow or self.seen.is_large else logging.INFO
            _LOGGER.log(level, "%s", self.seen)
            if self.report is not None:
                self.report(self.seen)
