"""The first training steps of a parallel module, beside what its plan says of them.

A step lasts from one training call of the module to the next, optimizer and data included.  The first one warms up; the
second and third are timed, and their peak memory is what CUDA's allocator says.  On a CPU, whose allocator counts
nothing, the fourth is watched (`allocation_watch`), which takes longer than a step alone.  Nothing communicates,
nothing waits for a device: on GPUs events are recorded, and read when they have passed.
"""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.lower.compat import local_part_of
from autopar.lower.observe.allocation_watch import AllocationWatch, OptimizerWatch
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
        measured_bytes: peak that was allocated on this device; 0: not known, and `memory_note` says why.
        step_time_error: how far the plan said that its step time can be off; 0: it did not.
        memory_error: the same of the peak.
        memory_note: why the peak is not known.
    """

    predicted_s: float
    measured_s: float
    spread: float
    predicted_bytes: float
    measured_bytes: float
    step_time_error: float
    memory_error: float
    memory_note: str = ""

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
        elif self.memory_note:
            text += f"; peak: not measured, {self.memory_note}"
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

    def __init__(
        self, plan: Plan, rank: int, device: torch.device, held: Callable[[], Iterable[Tensor]] = tuple
    ) -> None:
        """Nothing is seen yet; `report` is told once, on rank 0, what was.

        `held` gives what the module always holds: parameters, buffers, constants.
        """
        self.seen: StepComparison | None = None
        self.report: Report | None = None
        self._plan = plan
        self._rank = rank
        self._device = device
        self._held = held
        self._times_s: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._optimizers: OptimizerWatch | None = None
        self._returned: list[weakref.ref[torch.UntypedStorage]] = []
        self._watch: AllocationWatch | None = None
        self._is_over = False

    def interrupt(self) -> None:
        """Another call than a training one came between, or one failed: begin anew."""
        self._times_s.clear()
        self._events.clear()
        self._returned.clear()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def begin_step(self, batch: Iterable[Tensor] = ()) -> None:
        """A training call begins, with these inputs."""
        if self._is_over:
            return
        if self._device.type == "cuda":
            self._begin_on_gpu()
        elif self._watch is not None:
            self._end_watch()
        else:
            self._times_s.append(time.perf_counter())
            if self._optimizers is None:
                trained = [x for x in self._held() if isinstance(x, nn.Parameter)]
                self._optimizers = OptimizerWatch(trained, self._end_watch)
            if len(self._times_s) == _MARKS:
                self._begin_watch(batch, self._optimizers)

    def returns(self, values: Iterable[Tensor]) -> None:
        """A training call gives these to its caller, who may hold them while the next one runs."""
        if len(self._times_s) == _MARKS - 1:
            self._returned = [weakref.ref(local_part_of(x).untyped_storage()) for x in values]

    def _begin_on_gpu(self) -> None:
        if len(self._events) < _MARKS:
            if len(self._events) == 1:
                torch.cuda.reset_peak_memory_stats(self._device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        elif self._events[-1].query():
            steps_s = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events)]
            self._compare(steps_s, float(torch.cuda.max_memory_allocated(self._device)))

    def _begin_watch(self, batch: Iterable[Tensor], optimizers: OptimizerWatch) -> None:
        if not optimizers.is_known:
            self._compare(self._steps_s(), 0.0, "no optimizer of torch.optim has stepped")
            return
        held = list(self._held())
        gradients = [x.grad for x in held if x.grad is not None]
        known = [local_part_of(x).untyped_storage() for x in (*held, *gradients, *optimizers.state(), *batch)]
        known += [storage for each in self._returned if (storage := each()) is not None]
        self._watch = AllocationWatch(known)
        if not self._watch.is_running:
            self._end_watch()

    def _end_watch(self) -> None:
        """The step that is watched is over."""
        if self._watch is not None:
            self._watch.stop()
            self._compare(self._steps_s(), self._watch.peak_bytes, self._watch.reason)

    def _steps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self._times_s)]

    def _compare(self, steps_s: list[float], measured_bytes: float, memory_note: str = "") -> None:
        self._is_over = True
        self._watch = None
        if self._optimizers is not None:
            self._optimizers.remove()
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
            measured_bytes=measured_bytes,
            step_time_error=plan.step_time_error,
            memory_error=plan.memory_error,
            memory_note=memory_note,
        )
        if self._rank == 0:
            level = logging.WARNING if self.seen.is_slow or self.seen.is_large else logging.INFO
            _LOGGER.log(level, "%s", self.seen)
            if self.report is not None:
                self.report(self.seen)
