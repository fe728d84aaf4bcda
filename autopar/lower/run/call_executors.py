"""The executor of each call of a module: another mode, or inputs of another form, is often another program."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, InputShapeError, ModelError, PlanMismatchError, SubmoduleError
from autopar.lower.autograd import ambient_autocast
from autopar.lower.run.attributes import Attributes, Settings, settings_text
from autopar.lower.run.buffer_answers import BufferAnswers
from autopar.lower.run.execution import Executor
from autopar.lower.run.lowering import Executable
from autopar.lower.run.stage_map import StageMap
from autopar.objects.buffer_questions import questions_text
from autopar.objects.gradient_requests import GRADIENTS
from autopar.objects.outside_tensors import OutsideTensor
from autopar.plan import Plan

__all__ = ["MOST_FORMS", "CallExecutors", "ExecutablePlanner", "PlannedCall"]


class ExecutablePlanner(Protocol):
    """Finds what runs calls, with the parameters stored as they are."""

    def __call__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_training: bool,
        part: str = "",
        autocast: torch.dtype | None = None,
        settings: Settings = (),
        any_output: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> Executable:
        """For calls of the model, or of its submodule `part`, inside of ``torch.autocast`` to that dtype.

        `settings` are all attributes that differ from when the model was parallelized.  With `any_output` backward
        begins with the caller's gradients of any outputs.  `buffers` are those that forward may ask in Python.
        """
        ...

    def submodule(self, part: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The submodule as it was, with these parameters and buffers, by their names in the model."""
        ...

    def groups(self, args: Sequence[Any], kwargs: Mapping[str, Any], size: tuple[int, int]) -> Sequence[Executable]:
        """What each of `Plan.groups` runs in steps that come with such calls, of rows and tokens of `size`: one row."""
        ...

    @property
    def reads(self) -> Collection[tuple[str, str]]:
        """The attributes that any program was made with: path of the module, name."""
        ...


# Forms of calls that are kept for a mode.  Each holds its layers' programs and constants: some MB for a large model.
# The lengths of a bucketed data set are fewer; what alternates between more is planned again and again, and said.
MOST_FORMS = 64
_LOGGER = logging.getLogger("autopar")


@dataclass
class PlannedCall:
    """A form of calls that a module has run, or is ready to run.

    Attributes:
        inputs: name, shape and dtype of each input tensor, as text.
        is_training: whether it is for training mode.
        plan: what runs.
        planning_s: seconds from the first such call until it could run: tracing, pricing or searching, and lowering.
        calls: how many there were.
        part: the submodule that is called; ``""``: the model.
    """

    inputs: str
    is_training: bool
    plan: Plan = field(repr=False)
    planning_s: float
    calls: int = 0
    part: str = ""


class CallExecutors:
    """The executors of a module, each made when it is first needed.

    Attributes:
        first: that of the calls that the module was parallelized for.
        last_trained: that of the last training call of the model; before it the first.
        compile_layers: whether layers are compiled.
        attributes: of the module's submodules; calls run programs that were made with the values that these have.
        answers: of its buffers, likewise.
    """

    def __init__(
        self, first: Executor, planner: ExecutablePlanner | None, compile_layers: bool, attributes: Attributes
    ) -> None:
        """`planner` plans calls that are not known yet; None: other calls are refused."""
        self.first = first
        self.last_trained = first
        self._planner = planner
        self.compile_layers = compile_layers
        self.attributes = attributes
        attributes.watch(planner.reads if planner is not None else attributes.names)
        self.answers = BufferAnswers(attributes.root)
        self._has_warned = False
        self._from_any_output: dict[Executor, Executor] = {}  # in place of those whose backward begins with the loss
        # By mode, submodule and autocast's dtype, the one that was used last in front.
        self._known: dict[tuple[bool, str, torch.dtype | None], list[tuple[PlannedCall, Executor]]] = {}
        mode = first.executable.program.training
        self._remember(
            first, mode, "", self.autocast, planning_s=sum(seconds for _, seconds in first.executable.plan.planning_s)
        )

    @property
    def plans(self) -> tuple[PlannedCall, ...]:
        """All forms that are known: those of training first, of each mode the one that ran last first."""
        kinds = sorted(self._known, key=lambda kind: not kind[0])
        return tuple(call for kind in kinds for call, _ in self._known[kind])

    @property
    def trained(self) -> tuple[Executor, ...]:
        """Those of training calls of the whole model."""
        kinds = (known for (mode, part, _), known in self._known.items() if mode and not part)
        return tuple(executor for known in kinds for _, executor in known)

    @property
    def autocast(self) -> torch.dtype | None:
        """What calls here are autocast to: their programs have its casts."""
        return ambient_autocast(self.first.communicator.device.type) if self._planner else None

    def submodule(self, part: str, tensors: Mapping[str, Tensor]) -> nn.Module:
        """See `ExecutablePlanner.submodule`."""
        if self._planner is None:
            raise _no_planner(part)
        return self._planner.submodule(part, tensors)

    def forget_copies(self) -> None:
        """Parameters may change now."""
        for known in self._known.values():
            for _, executor in known:
                executor.forget_copies()

    def find(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_training: bool, part: str = ""
    ) -> tuple[Executor, Sequence[Tensor]] | None:
        """What runs such calls and this one's tensors; None if it has to be planned.

        Raises:
            LossError: the target is missing, in training.
            InputShapeError: the inputs are others than planned for, and there is no planner.
            ModelError: an attribute that forward reads is an object now, or what it reads elsewhere has changed.
        """
        settings = self.attributes.usable_settings()
        known = self._look_up(args, kwargs, settings, is_training=is_training, part=part)
        if known is None:
            return None
        call, executor, tensors = known
        _check_outside(executor.executable.outside, call.calls)
        call.calls += 1
        self.answers.count(executor.executable.questions)
        if is_training and not part and GRADIENTS not in kwargs:
            self.last_trained = executor
        return executor, tensors

    def _look_up(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], settings: Settings, *, is_training: bool, part: str
    ) -> tuple[PlannedCall, Executor, Sequence[Tensor]] | None:
        known = self._known.setdefault((self._mode(is_training), part, self.autocast), [])
        for place, (call, executor) in enumerate(known):
            executable = executor.executable
            if executable.settings != settings or not self.answers.are_known(executable.questions):
                continue
            try:
                tensors = executable.read_inputs(args, kwargs)
            except InputShapeError:
                if self._planner is None:
                    raise
                continue
            if place:
                known.insert(0, known.pop(place))
            return call, executor, tensors
        return None

    def plan(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_training: bool, part: str = "") -> PlannedCall:
        """What is planned for such calls, now or before.  Every rank calls it with inputs of the same form.

        Raises:
            LossError: the target is missing, in training.
            PlanMismatchError: a stage lacks parameters that it reads in such calls.
            InputShapeError: the model can't be called so.
            AutoparError: it can't be traced or planned, or the module was lowered for training only.
        """
        settings = self.attributes.changed()
        known = self._look_up(args, kwargs, settings, is_training=is_training, part=part)
        if known is not None:
            return known[0]
        mode = self._mode(is_training)
        any_output = mode and (GRADIENTS in kwargs or (not part and bool(self._from_any_output)))
        return self._make_known(args, kwargs, mode, part, self.autocast, any_output=any_output)

    @property
    def can_plan(self) -> bool:
        """Whether calls that are not known yet can be planned."""
        return self._planner is not None

    def from_any_output(
        self,
        executor: Executor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        part: str,
        autocast: torch.dtype | None,
    ) -> Executor:
        """What runs this training call, which `executor` ran, with a backward that begins with gradients of any output.

        From now on such calls run by it, and other training calls are planned so.

        Raises:
            AutoparError: there is no such plan.
        """
        if executor not in self._from_any_output:
            self._make_known(args, kwargs, True, part, autocast, any_output=True)
            known = self._known[True, part, autocast]
            self._from_any_output[executor] = known[0][1]
            known[1:] = [each for each in known[1:] if each[1] is not executor or executor is self.first]
        return self._from_any_output[executor]

    def _make_known(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: bool, part: str, autocast: torch.dtype | None,
        *, any_output: bool = False,
    ) -> PlannedCall:  # fmt: skip
        started_s = time.perf_counter()
        executor = self._make(args, kwargs, mode, part, autocast, any_output=any_output)
        known = self._remember(executor, mode, part, autocast, planning_s=time.perf_counter() - started_s)
        if len(known) > MOST_FORMS:
            oldest = next(i for i in reversed(range(len(known))) if known[i][1] is not self.first)
            del known[oldest]
            self._report_too_many(known)
        self._report(known[0][0])
        return known[0][0]

    def _report(self, made: PlannedCall) -> None:
        """Tell the user, on one rank."""
        if self.first.communicator.rank:
            return
        what = f"{made.part} on " if made.part else ""
        text = f"planned for {what}{made.inputs} in {made.planning_s:.1f} s ({made.plan.strategies[0].axes} ...)"
        notes = [note for note in made.plan.notes if note not in self.first.executable.plan.notes]
        _LOGGER.log(logging.WARNING if notes and not made.part else logging.INFO, "%s", "\n  ".join([text, *notes]))

    def _report_too_many(self, known: Sequence[tuple[PlannedCall, Executor]]) -> None:
        """Tell the user once, on one rank, what calls of so many forms cost."""
        if self._has_warned or self.first.communicator.rank:
            return
        self._has_warned = True
        mean_s = sum(call.planning_s for call, _ in known) / len(known)
        _LOGGER.warning(
            "calls came with inputs of more than %d forms, each of which is planned when it comes (%.1f s on average): "
            "the plans that were used least recently are dropped, and made again when such a call comes. Pad lengths, "
            "or scale images, to fewer sizes; pass numbers that differ in every call as tensors", MOST_FORMS, mean_s,
        )  # fmt: skip

    def _mode(self, is_training: bool) -> bool:
        return is_training and self.first.executable.program.training

    def _remember(
        self, executor: Executor, mode: bool, part: str, autocast: torch.dtype | None, planning_s: float
    ) -> list[tuple[PlannedCall, Executor]]:
        program, plan = executor.executable.program, executor.executable.plan
        plain = [name for name in program.inputs if name not in program.carried]
        text = executor.executable.form or ", ".join(
            f"{n} {list(program.type_of(n).shape)} {program.type_of(n).dtype}" for n in plain
        )
        text += ", keys and values" if len(plain) < len(program.inputs) else ""
        text += f", autocast to {autocast}" if autocast else ""
        text += f", {settings_text(executor.executable.settings)}" if executor.executable.settings else ""
        text += f", {questions_text(executor.executable.questions)}" if executor.executable.questions else ""
        known = self._known.setdefault((mode, part, autocast), [])
        self.answers.watch(executor.executable.questions)
        known.insert(0, (PlannedCall(text, mode, plan, planning_s, part=part), executor))
        return known

    def _make(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: bool, part: str, autocast: torch.dtype | None,
        *, any_output: bool,
    ) -> Executor:  # fmt: skip
        first = self.first
        if self._planner is None:
            if part:
                raise _no_planner(part)
            if self.attributes.changed():
                raise ModelError(
                    "this module was lowered for the values that attributes had then, and without a planner it has to "
                    f"keep them; now {settings_text(self.attributes.changed())}"
                )
            if answers := self.answers.changed():
                raise ModelError(
                    "this module was lowered for the values that buffers had then, and without a planner it has to "
                    f"keep what forward asked of them; now {answers}"
                )
            if first.is_random or first.executable.program.updates:
                raise AutoparError(
                    "this module was lowered for training only: it draws random numbers or updates "
                    "buffers, so eval() needs a planner"
                )
            return first
        self.answers.check()
        settings = self.attributes.changed(everywhere=True)
        executable = self._planner(args, kwargs, mode, part, autocast, settings, any_output, self.answers.values)
        self.attributes.watch(self._planner.reads)
        self._check_places(executable, "training" if mode else "eval")
        return Executor(executable, first.store, first.communicator, self.compile_layers)

    def _check_places(self, made: Executable, mode: str) -> None:
        """Raise PlanMismatchError, on every rank, unless each stage finds the parameters that it reads or writes."""
        own, store = self.first.stages, self.first.store
        for name in (made.program.parameters[written] for written in made.program.updates):
            if not store.is_whole(name, own.plan.num_groups):
                raise PlanMismatchError(
                    f"in {mode} mode forward writes to the parameter {name!r}, of which each rank stores a part, as "
                    "forward only read it when the model was parallelized: call autopar.parallelize while forward "
                    "writes to it, or register it as a buffer"
                )
        stages = StageMap(made.program, made.plan, own.rank)
        for name, groups in stages.holders.items():
            stored = store.stored.get(store.first_name.get(name, name))
            stored_on = groups if stored is None else stored.groups
            if stages.axis != own.axis or not set(groups) <= set(stored_on):
                raise PlanMismatchError(
                    f"in {mode} mode {name!r} is read on device groups {list(groups)} of {stages.plan.num_groups}, but "
                    f"the pipeline stages of training keep it on {list(stored_on)} of {own.plan.num_groups}.  For the "
                    "loss of a batch stay in training mode under torch.no_grad(); for outputs load full_state_dict() "
                    "into the original model"
                )


def _no_planner(part: str) -> SubmoduleError:
    return SubmoduleError(
        f"{part!r} is part of a parallelized model that was lowered without a planner, and does not run alone: call "
        "the whole model"
    )


def _check_outside(tensors: Sequence[OutsideTensor], num_calls: int) -> None:
    """Raise ModelError if one is no longer what it is in a program that has run `num_calls` times.

    Entries are read after 0, 1, 2, 4, 8, ... calls: a few times in a training run, and often enough in its first steps
    to find what a script writes to in every step.
    """
    reads_entries = num_calls & (num_calls - 1) == 0
    for each in tensors:
        if each.is_changed(reads_entries=reads_entries):
            raise ModelError(
                f"{each.where}: forward reads a tensor ({each.text}) that is not the model's, but that of a global "
                "variable or another object. So it is a constant of the program, and it has changed since that was "
                "traced. Before autopar.parallelize, make its module a submodule (self.teacher = teacher), with "
                "requires_grad_(False) if the optimizer doesn't train it, or register_buffer it; or pass it to the call"
            )
