"""Runs training steps with a stopwatch on this rank's layers and collectives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from autopar.errors import QuestionError
from autopar.headline import describe_parallelism, throughput
from autopar.lower.observe.expert_rows import ExpertRows
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
    for _ in range(warmup - 1):
        step()
    rows: list[dict[str, tuple[int, ...]]] = []
    warm = [_measure(executor, step, rows)] if warmup > 0 else []
    timed = [_measure(executor, step, None if warm or place else rows) for place in range(max(steps, 1))]
    result = profile_kernels(lambda: _measure(executor, step), executor.communicator.device) if kernels else ()
    alike: dict[int, list[int]] = {}
    for index, runner in executor.runners.items():
        alike.setdefault(id(runner.program), []).append(index)
    names = {index: runner.layer.name for index, runner in executor.runners.items()}
    report = StepReport.of(timed, predicted, names, tuple(map(tuple, alike.values())), executor.stages.group, result)
    plan = executor.executable.plan
    parts = ["measured", describe_parallelism(plan.decisions)]
    if plan.costs:
        parts.append(throughput(plan.prediction, plan.world_size, report.measured.step_s))
    return replace(report, expert_rows=rows[0], headline=" · ".join(parts))


def _measure(
    executor: Executor, step: Callable[[], object], rows: list[dict[str, tuple[int, ...]]] | None = None
) -> StepTimeline:
    """A step; what experts get in it is added to `rows`."""
    names = [layer.name for layer in executor.executable.program.layers]
    stopwatch = Stopwatch(executor.stages.group, names, executor.communicator.device)
    executor.stopwatch = stopwatch
    counter = ExpertRows(executor, stopwatch)
    try:
        with executor.communicator.watching(stopwatch.watch), nullcontext() if rows is None else counter:
            step()
    finally:
        executor.stopwatch = None
    if stopwatch.is_empty:
        raise QuestionError(
            "no layer of the plan ran in this step: a report follows calls with inputs of the form that the module was "
            "parallelized for, of which other rows or lengths run by plans of their own: pass such a batch"
        )
    timeline = stopwatch.read()
    if rows is not None:
        rows.append(counter.read())
    return timeline
