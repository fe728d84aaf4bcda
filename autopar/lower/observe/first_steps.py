"""The first training steps of a parallel module, compared with what its plan predicts.

A step lasts from one training call of the module to the next, optimizer and data included.  The first one warms up; the
second and third are timed, and on an accelerator their peak memory is what its allocator says.  Nothing communicates,
nothing waits for a device: events are recorded, and read when they have passed (`autopar.host.accelerators`: devices
without timed events are timed by the host).
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass

import torch

from autopar.host.accelerators import peak_bytes, reset_peak_bytes, times_events
from autopar.pages.shapes import digits, size
from autopar.plan import Plan

__all__ = ["FirstSteps", "StepComparison"]

_LOGGER = logging.getLogger("autopar")
_MARKS = 4  # the beginnings of steps 1 to 4
# Libraries of products keep workspaces that no plan counts, as its limit leaves room for them: 64 MiB in most steps
# that were measured on H100s (``benchmarks/measured/h100-steps.json``), 80 MiB in a small one.
_WORKSPACE_BYTES = 128 * 2**20


@dataclass(frozen=True)
class StepComparison:
    """A real step of this rank, compared with its prediction.

    Args:
        predicted_s: seconds that the plan predicts.
        measured_s: seconds from one call to the next, the mean of two steps.
        spread: difference of the two over their mean.
        predicted_bytes: peak that the plan predicts for this rank's device group.
        measured_bytes: peak that was allocated on this device; 0 where nobody counts it, as on a CPU.
        memory_error: how far the plan says that its peak can be off, relative to it; 0: it does not say.
    """

    predicted_s: float
    measured_s: float
    spread: float
    predicted_bytes: float
    measured_bytes: float
    memory_error: float

    @property
    def is_large(self) -> bool:
        """Whether the peak is above the plan's error bar, by more than libraries keep."""
        most = self.predicted_bytes * (1 + self.memory_error) + _WORKSPACE_BYTES
        return bool(self.memory_error) and self.measured_bytes > most

    def __str__(self) -> str:
        """One line, and one more with what to do if the peak is above its error bar."""
        text = f"step: {digits(self.measured_s * 1e3)} ms, predicted {digits(self.predicted_s * 1e3)} ms"
        if self.measured_bytes:
            text += f"; peak: {size(self.measured_bytes).text}, predicted {size(self.predicted_bytes).text}"
            text += f" +- {self.memory_error:.0%}" if self.memory_error else ""
        if self.is_large:
            text += (
                "\nThe peak is above the plan's error bar: are there other tensors on the device, or are outputs kept? "
                "Pass a smaller `memory=` to parallelize"
            )
        return text


class FirstSteps:
    """Times a module's first training calls; afterwards it does nothing."""

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        """Nothing is seen yet."""
        self.seen: StepComparison | None = None
        self._plan = plan
        self._rank = rank
        self._device = device
        self._times_s: list[float] = []
        self._events: list[torch.Event] = []

    def interrupt(self) -> None:
        """Another call than a training one came between, or one failed: begin anew."""
        self._times_s.clear()
        self._events.clear()

    def begin_step(self) -> None:
        """A training call begins."""
        if self.seen is not None:
            return
        if self._device.type != "cpu" and len(self._times_s) + len(self._events) == 1:
            reset_peak_bytes(self._device)
        if times_events(self._device.type):
            self._begin_with_event()
            return
        self._times_s.append(time.perf_counter())
        if len(self._times_s) == _MARKS:
            self._compare([after - before for before, after in itertools.pairwise(self._times_s)])

    def _begin_with_event(self) -> None:
        if len(self._events) < _MARKS:
            event = torch.Event(self._device, enable_timing=True)
            event.record()
            self._events.append(event)
        elif self._events[-1].query():
            steps_s = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events)]
            self._compare(steps_s)

    def _compare(self, steps_s: list[float]) -> None:
        self.interrupt()
        plan = self._plan
        _, second, third = steps_s
        mean = (second + third) / 2
        self.seen = StepComparison(
            predicted_s=plan.step_time_s,
            measured_s=mean,
            spread=abs(second - third) / mean if mean else 0.0,
            predicted_bytes=plan.group_peak_bytes(self._rank // plan.group_size),
            measured_bytes=peak_bytes(self._device) if self._device.type != "cpu" else 0.0,
            memory_error=plan.memory_error,
        )
        if self._rank == 0:
            _LOGGER.log(logging.WARNING if self.seen.is_large else logging.INFO, "%s", self.seen)
