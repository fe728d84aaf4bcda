"""Runs training steps with a stopwatch on this rank's layers and collectives."""

from __future__ import annotations

from collections.abc import Callable

from autopar.lower.observe.kernel_profile import profile_kernels
from autopar.lower.observe.step_report import StepReport
from autopar.lower.observe.stopwatch import Stopwatch
from autopar.lower.run.execution import Executor
from autopar.timeline import StepTimeline

__all__ = ["report_steps"]


def report_steps(
    executor: Executor,
    predicted: StepTimeline | None,
    step: Callable[[], object],
    steps: int,
    warmup: int,
    *,
    kernels: bool = False,
) -> StepReport:
    """See `ParallelModule.report`."""
    for _ in range(warmup):
        step()
    timed = [_measure(executor, step) for _ in range(max(steps, 1))]
    result = profile_kernels(lambda: _measure(executor, step), executor.communicator.device) if kernels else ()
    alike: dict[int, list[int]] = {}
    for index, runner in executor.runners.items():
        alike.setdefault(id(runner.program), []).append(index)
    names = {index: runner.layer.name for index, runner in executor.runners.items()}
    return StepReport.of(timed, predicted, names, tuple(map(tuple, alike.values())), executor.stages.group, result)


def _measure(executor: Executor, step: Callable[[], object]) -> StepTimeline:
    names = [layer.name for layer in executor.executable.program.layers]
    stopwatch = Stopwatch(executor.stages.group, names, executor.communicator.device)
    executor.stopwatch = stopwatch
    try:
        with executor.communicator.watching(stopwatch.watch):
            step()
    finally:
        executor.stopwatch = None
    return stopwatch.read()
