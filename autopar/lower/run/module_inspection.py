"""Inspection of a parallel module: its plans, its program, the rows of a rank, and reports of steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.communication.collectives import Collective
from autopar.lower.compat import make_dtensor
from autopar.lower.groups.group_steps import GroupSteps
from autopar.lower.observe.first_steps import FirstSteps, StepComparison
from autopar.lower.observe.predictions import Predictions
from autopar.lower.observe.reporting import report_steps
from autopar.lower.observe.step_report import StepReport
from autopar.lower.program.program_text import LoweredProgram
from autopar.lower.run.call_executors import CallExecutors, PlannedCall
from autopar.lower.run.call_inputs import CallInputs
from autopar.lower.run.layer_runner import LayerRunner
from autopar.lower.run.module_state import ModuleState
from autopar.placement import refine_layout
from autopar.plan import Plan
from autopar.step.layer.data_split import DataSplit

__all__ = ["ModuleInspection"]


class ModuleInspection(ModuleState):
    """The base of `ParallelModule` that only reads."""

    call_inputs: CallInputs | None
    _executors: CallExecutors
    _predictions: Predictions | None
    _data_split: DataSplit
    _first_steps: FirstSteps
    _group_steps: GroupSteps | None

    @property
    def plan(self) -> Plan:
        """The plan that it runs, with the decisions for other calls that it has run: save it to have them again."""
        plan = self._executor.executable.plan
        made = [call.plan.decisions for call in self.plans if call.plan is not plan]
        known = {decisions.fingerprint: decisions for decisions in (*plan.other_calls, *reversed(made))}
        return replace(plan, other_calls=tuple(known.values())) if made else plan

    @property
    def data_split(self) -> DataSplit:
        """Which rows of a batch each rank passes where inputs are local."""
        return self._data_split

    @property
    def data_parallel_size(self) -> int:
        """Into how many parts the rows of a batch are split: ``num_replicas`` of a ``DistributedSampler``."""
        return self.data_split.size

    @property
    def data_rank(self) -> int:
        """Which of these parts is this rank's, 0 <= data_rank < data_parallel_size: ``rank`` of a
        ``DistributedSampler``.  Ranks that need the same rows have the same one (`autopar.step.layer.data_split`).
        """
        return self.data_split.rank_of(self._communicator.rank)

    def join_rows(self, rows: Tensor) -> DTensor:
        """The rows of all data-parallel ranks as a DTensor, in their order; nothing is communicated.

        For inputs ``[rows, ...]`` that have other rows than the batch, such as those of an encoder, with
        ``inputs="local"``: the layers that split them as the batch use them in place.

        Args:
            rows: this rank's, as many as each other rank has.
        """
        split, store = self.data_split, self._store
        layout = refine_layout(split.layout, split.mesh, store.mesh)
        shape = (len(rows) * split.size, *rows.shape[1:])
        return make_dtensor(rows.to(self._communicator.device), store.device_mesh, layout, shape)

    @property
    def plans(self) -> tuple[PlannedCall, ...]:
        """The forms of calls that it has plans for, one per mode and shapes of inputs: see `PlannedCall`.

        At most 64 are kept for each mode; the one that was used least recently goes first.
        """
        return self._executors.plans

    @property
    def program(self) -> LoweredProgram:
        """What this rank runs; ``print(model.program)`` shows it."""
        executable = self._executor.executable
        collective_s = None if self._predictions is None else self._predictions.collective_s
        hoisted = self._executor.hoisted.module
        return LoweredProgram(executable.program, executable.plan, self.layer_runners, collective_s, hoisted)

    @property
    def observed(self) -> StepComparison | None:
        """A real step of this rank, compared with what the plan predicts: known from the fourth training call on (on a
        GPU once it has run the third step).
        """
        return self._first_steps.seen

    @property
    def layer_runners(self) -> tuple[LayerRunner, ...]:
        """The lowered layers in order, for tools that watch them run."""
        return tuple(self._executor.runners.values())

    def recording(self) -> AbstractContextManager[list[Collective]]:
        """A context that lists every collective that this rank runs inside it.

        Example:
            >>> with model.recording() as collectives:
            ...     model(**batch).loss.backward()
        """
        return self._communicator.recording()

    def report(
        self, step: Callable[[], object], *, steps: int = 3, warmup: int = 1, kernels: bool = False
    ) -> StepReport:
        """Run training steps and set what they take against what was predicted, layer by layer.

        Every rank must call it, as any step.  A rank measures itself.  On a CPU that is what passes on the clock, so
        ranks that share cores measure each other, too; of compiled layers their collectives count as theirs.

        Args:
            step: one whole training step, optimizer included.
            steps: how many to measure.
            warmup: how many to run before.
            kernels: run one more under `torch.profiler`, to list what each kind of layer spends its time on.

        Raises:
            QuestionError: no measured step ran by one plan that was known before.

        Example:
            >>> report = model.report(lambda: train_step(model, optimizer, batch))
            >>> print(report)
            >>> report.trace("trace.json")  # and report.html("report.html")
        """
        return report_steps(
            self._executors, self._group_steps, self._predictions, self.call_inputs, step, steps, warmup,
            kernels=kernels,
        )  # fmt: skip
