"""Runs training steps with a stopwatch on this rank's layers and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from autopar.errors import QuestionError
from autopar.lower.observe.balance import Dealt, compare_balance
from autopar.lower.observe.expert_rows import ExpertRows
from autopar.lower.observe.kernel_profile import profile_kernels
from autopar.lower.observe.predictions import Predictions
from autopar.lower.observe.step_report import StepReport
from autopar.lower.observe.stopwatch import Stopwatch
from autopar.lower.run.call_executors import CallExecutors
from autopar.lower.run.call_inputs import CallInputs
from autopar.lower.run.execution import Executor
from autopar.plan.headline import describe_parallelism, throughput
from autopar.timeline import StepTimeline

__all__ = ["report_steps"]


def report_steps(
    executors: CallExecutors,
    predictions: Predictions | None,
    inputs: CallInputs | None,
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
    if warmup > 0:
        _measure(executors.last_trained, step, rows)
    executor = executors.last_trained  # which the last step before has made, or brought to the front
    timed: list[StepTimeline] = []
    dealt: list[tuple[Dealt, StepTimeline]] = []
    for _ in range(max(steps, 1)):
        timeline = _measure(executor, step, None if rows else rows)
        if timeline is not None:
            timed.append(timeline)
            if inputs is not None and inputs.dealt is not None:
                dealt.append((inputs.dealt, timeline))
    if not timed:
        raise _not_measured()
    result = profile_kernels(lambda: _measured(executor, step), executor.communicator.device) if kernels else ()
    alike: dict[int, list[int]] = {}
    for index, runner in executor.runners.items():
        alike.setdefault(id(runner.program), []).append(index)
    names = {index: runner.layer.name for index, runner in executor.runners.items()}
    predicted = predictions.timeline() if predictions is not None and executor is executors.first else None
    report = StepReport.of(timed, predicted, names, tuple(map(tuple, alike.values())), executor.stages.group, result)
    plan = executor.executable.plan
    parts = ["measured", describe_parallelism(plan.decisions)]
    if plan.costs:
        parts.append(throughput(plan.prediction, plan.world_size, report.measured.step_s))
    gather = None if inputs is None else partial(_gather, inputs)
    balance = None if gather is None else compare_balance(dealt, executor.stages.group, gather)
    return replace(report, expert_rows=rows[0], headline=" · ".join(parts), balance=balance)


def _measure(
    executor: Executor, step: Callable[[], object], rows: list[dict[str, tuple[int, ...]]] | None = None
) -> StepTimeline | None:
    """A step, None if another executor ran it; what experts get in it is added to `rows`."""
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
        return None
    timeline = stopwatch.read()
    if rows is not None:
        rows.append(counter.read())
    return timeline


def _gather(inputs: CallInputs, numbers: Sequence[int]) -> list[list[int]]:
    return inputs.numbers_of_ranks("report {}", lambda: numbers)


def _measured(executor: Executor, step: Callable[[], object]) -> StepTimeline:
    timeline = _measure(executor, step)
    if timeline is None:
        raise _not_measured()
    return timeline


def _not_measured() -> QuestionError:
    return QuestionError(
        "no layer of the plan ran in the steps that were measured: a report follows training calls of the form that "
        "came last before, and other rows or lengths run by plans of their own: pass batches of one form, or measure "
        "more steps"
    )
