"""Runs training steps with a stopwatch on this rank's layers and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import QuestionError
from autopar.lower.groups.group_steps import GroupSteps
from autopar.lower.observe.balance import Balance, Dealt, compare_balance
from autopar.lower.observe.expert_rows import ExpertRows
from autopar.lower.observe.kernel_profile import profile_kernels
from autopar.lower.observe.predictions import Predictions
from autopar.lower.observe.step_report import StepReport
from autopar.lower.observe.stopwatch import StepClock, Stopwatch
from autopar.lower.run.call_executors import CallExecutors
from autopar.lower.run.call_inputs import CallInputs
from autopar.lower.run.execution import Executor
from autopar.plan.headline import describe_parallelism, throughput
from autopar.timeline import StepTimeline

__all__ = ["report_steps"]


@dataclass(frozen=True)
class _Measured:
    """A step, the executor that ran it on this rank (of several groups, that of the largest), and its batch if a
    balanced loader gave it.
    """

    executor: Executor
    timeline: StepTimeline
    dealt: Dealt | None


def report_steps(
    executors: CallExecutors,
    groups: GroupSteps | None,
    predictions: Predictions | None,
    inputs: CallInputs | None,
    step: Callable[[], object],
    steps: int,
    warmup: int,
    *,
    kernels: bool = False,
) -> StepReport:
    """See `ParallelModule.report`."""
    following = _Following(executors, groups, inputs, step)
    for _ in range(warmup - 1):
        step()
    rows = [following.rows_of_experts()] if warmup > 0 else []
    measured = [following.measure() for _ in range(max(steps, 1))]
    timed = [each for each in measured if isinstance(each, _Measured)]
    if not timed:
        raise _not_measured()
    rows = rows or [{}]
    counts = Counter(id(each.executor) for each in reversed(timed))
    executor = max((each.executor for each in reversed(timed)), key=lambda executor: counts[id(executor)])
    own = [each.timeline for each in timed if each.executor is executor]
    result = ()
    if kernels:
        result = profile_kernels(lambda: following.measure_by(executor), executor.communicator.device)
    same_program: dict[int, list[int]] = {}
    for index, runner in executor.runners.items():
        same_program.setdefault(id(runner.program), []).append(index)
    names = {index: runner.layer.name for index, runner in executor.runners.items()}
    predicted = predictions.timeline() if predictions is not None and executor is executors.first else None
    report = StepReport.of(
        own, predicted, names, tuple(map(tuple, same_program.values())), executor.stages.group, result
    )
    return replace(
        report, expert_rows=rows[0], headline=_headline(executor, groups, report.measured.step_s),
        balance=following.balance(measured), other_steps=len(timed) - len(own),
    )  # fmt: skip


def _headline(executor: Executor, groups: GroupSteps | None, step_s: float) -> str:
    plan = executor.executable.plan
    parts = ["measured", describe_parallelism(plan.decisions)]
    if groups is not None and executor in groups.executors:
        parts.insert(1, f"groups of unlike size, this rank's of {plan.world_size}")
    if plan.costs:
        parts.append(throughput(plan.prediction, plan.world_size, step_s))
    return " · ".join(parts)


class _Following:
    """Measures steps, whichever plan runs them."""

    def __init__(
        self,
        executors: CallExecutors,
        groups: GroupSteps | None,
        inputs: CallInputs | None,
        step: Callable[[], object],
    ) -> None:
        self._executors = executors
        self._groups = groups
        self._inputs = inputs
        self._step = step

    def measure(self) -> _Measured | Dealt | None:
        """A step; what was assigned, or None, where it can't be told which plan ran it: one that was made in it, or
        several, but for those of the groups of one step.
        """
        watches, ran = self._run(nullcontext)
        dealt = None if self._inputs is None else self._inputs.dealt
        grouped = () if self._groups is None else self._groups.executors
        is_known = len(ran) == 1 or all(executor in grouped for executor in ran)
        if not ran or not is_known or any(executor not in watches for executor in ran):
            return dealt
        joined = watches[ran[0]].joined([watches[executor] for executor in ran[1:]])
        return dealt if joined is None else _Measured(ran[0], joined.read(), dealt)

    def measure_by(self, executor: Executor) -> StepTimeline:
        """A step of this executor."""
        measured = self.measure()
        if not isinstance(measured, _Measured) or measured.executor is not executor:
            raise _not_measured()
        return measured.timeline

    def rows_of_experts(self) -> dict[str, tuple[int, ...]]:
        """Rows of each expert in a step, if the plan of the last step runs it."""
        executor = self._executors.last_trained
        counters: list[ExpertRows] = []

        def count(watches: Mapping[Executor, Stopwatch]) -> AbstractContextManager[object]:
            counters.append(ExpertRows(executor, watches[executor]))
            return counters[0]

        watches, _ = self._run(count)
        return {} if watches[executor].is_empty else counters[0].read()

    def balance(self, steps: Sequence[_Measured | Dealt | None]) -> Balance | None:
        """How even ranks were in these steps.  Every rank calls it."""
        inputs = self._inputs
        if inputs is None:
            return None
        pairs = [(each.dealt, each.timeline) if isinstance(each, _Measured) else (each, None) for each in steps]
        dealt = [(known, timeline) for known, timeline in pairs if known is not None]
        return compare_balance(dealt, self._executors.first.stages.group, partial(_gather, inputs))

    def _run(
        self, around: Callable[[Mapping[Executor, Stopwatch]], AbstractContextManager[object]]
    ) -> tuple[Mapping[Executor, Stopwatch], list[Executor]]:
        """Run a step; returns the stopwatches, and those executors that ran on this rank, as far as is known."""
        groups = self._groups
        known = [*self._executors.trained, *(groups.executors if groups is not None else ())]
        communicator = self._executors.first.communicator
        clock = StepClock(communicator.device)
        watches: dict[Executor, Stopwatch] = {}
        for executor in known:
            names = [layer.name for layer in executor.executable.program.layers]
            watches[executor] = executor.stopwatch = Stopwatch(clock, executor.stages.group, names)
        if groups is not None:
            groups.last = None
        try:
            with communicator.watching(clock.watch), around(watches):
                self._step()
        finally:
            for executor in known:
                executor.stopwatch = None
        ran = [executor for executor in known if not watches[executor].is_empty]
        if groups is not None and groups.last is not None and groups.last not in ran:
            ran.append(groups.last)  # whose group had no rows
        return watches, ran


def _gather(inputs: CallInputs, numbers: Sequence[int]) -> list[list[int]]:
    return inputs.numbers_of_ranks("report {}", lambda: numbers)


def _not_measured() -> QuestionError:
    return QuestionError(
        "no measured step made one training call by a plan that was known before: let `step` call the model once in "
        "training mode; batches of other numbers of rows or lengths are planned when they first come, so run one of "
        "each before, or measure more steps"
    )
