"""An edited plan: whether it fits the model, what it costs now, and what the edit costs against the best plan."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import MaterializationError, QuestionError
from autopar.explain.documents import describe_plan
from autopar.explain.editing import Edit, apply_edits
from autopar.explain.planner import Answer, Planner
from autopar.explain.question import Question
from autopar.lower.compat import leaves_of, map_leaves
from autopar.lower.parameters.materialize import materialize
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.step.plan_check import check_fit
from autopar.step.pricing import predict
from autopar.step.variants.planned_program import as_decided
from autopar.user_text.progress import phase
from autopar.verify import VerificationReport, verify
from autopar.verify.shrink_plan import shrink_plan

__all__ = ["Checked", "check_plan", "load_plan", "rehearse"]


@dataclass(frozen=True, eq=False)
class Checked:
    """An edited plan that runs on the model, priced again, and the best plan.

    `before` is the plan as it was read, or the best one, before the changes of ``--set``.
    """

    best: Answer
    before: Plan
    answer: Answer

    @property
    def fits(self) -> bool:
        """Whether it fits in memory with the margin for the error of predictions, as a search requires."""
        plan = self.answer.plan
        return plan.peak_memory_bytes * (1 + plan.memory_error) <= self.best.plan.memory_limit_bytes

    @property
    def verdict(self) -> str:
        """What the edit costs, in a sentence."""
        plan, best = self.answer.plan, self.best.plan
        share = plan.step_time_s / best.step_time_s - 1
        text = f"it runs on this model and these devices; step time {share:+.1%} compared to the best plan"
        if not self.fits:
            peak, limit = plan.peak_memory_bytes / 2**30, best.memory_limit_bytes / 2**30
            margin = f" (within {plan.memory_error:.0%})" if plan.memory_error else ""
            text += f", but it does not fit: {peak:.3g} GiB{margin} per device of {limit:.3g} GiB"
        return text

    def describe(self) -> dict[str, Any]:
        """For ``--json``."""
        best, plan = self.best.plan, self.answer.plan
        return {
            "fits": self.fits,
            "plan": describe_plan(plan),
            "step_time_s": [best.step_time_s, plan.step_time_s],
            "peak_memory_bytes": [best.peak_memory_bytes, plan.peak_memory_bytes],
        }


def check_plan(
    planner: Planner, question: Question, path: str, edits: Sequence[Edit] = (), *, may_lack: bool = False
) -> Checked:
    """Check and price the plan at `path` after these edits.

    Args:
        planner: of the model.
        question: what the best plan is searched for.
        path: of the plan.
        edits: see `autopar.explain.editing`.
        may_lack: where there is no such file, take the best plan.

    Raises:
        PlanFormatError: the file is no plan.
        PlanMismatchError: it is for another model, other inputs or another number of devices.
        QuestionError: an edit can't be made.
    """
    best = planner.answer(question)
    before = best.plan if may_lack and not Path(path).exists() else load_plan(path)
    world_size = question.cluster.world_size
    best = replace(best, program=as_decided(planner.program(question), before.decisions))
    check_fit(before, best.program, world_size)
    edited = apply_edits(before, best.program, edits)
    check_fit(edited, best.program, world_size)
    before, priced = (
        replace(
            plan,
            prediction=predict(best.program, plan.decisions, best.prices, best.training, schedule_actions),
            memory_limit_bytes=best.plan.memory_limit_bytes,
            memory_error=best.plan.memory_error,
        )
        for plan in (before, edited)
    )
    return Checked(best, before, replace(best, plan=priced))


def load_plan(path: str) -> Plan:
    """The plan that was saved at `path`.

    Raises:
        QuestionError: there is no such file.
        PlanFormatError: it is no plan.
    """
    if not Path(path).exists():
        raise QuestionError(
            f"plan {path!r} can't be read: there is no such file; write one with TARGET --cluster ... --save {path}"
        )
    if not Path(path).is_file():
        raise QuestionError(f"plan {path!r} can't be read: it is no file; name one that --save wrote")
    return Plan.load(path)


@phase("running the plan on simulated ranks")
def rehearse(planner: Planner, question: Question, plan: Plan) -> VerificationReport:
    """Run the plan on simulated ranks in this process and compare with one device (`autopar.verify`).

    A target on the meta device is given values first, as building it would, if this machine's memory has room.

    Raises:
        QuestionError: the target is too large for this machine, or does not say what its values are.
        VerificationError: they compute something else.
    """
    target = planner.model(question)
    tensors = [*target.model.parameters(), *target.model.buffers(), *leaves_of(target.example_inputs)]
    if not any(getattr(tensor, "is_meta", False) for tensor in tensors):
        return verify(target.model, plan, target.example_inputs)
    _check_room(planner.target, target.model, plan)
    inputs = map_leaves(_with_values, target.example_inputs)
    try:
        model = materialize(copy.deepcopy(target.model))
    except MaterializationError as error:
        raise QuestionError(
            f"--rehearse runs {planner.target!r}, so it needs values. {str(error).split('. ')[0]}. Write that "
            "method, or name a factory (file.py:factory) that returns a model with values"
        ) from error
    return verify(model, plan, inputs)


def _check_room(target: str, model: nn.Module, plan: Plan) -> None:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    # The judge and every simulated rank hold float64 parameters, gradients and two moments at most.
    num_bytes = num_parameters * 4 * 8 * (1 + shrink_plan(plan).world_size)
    room_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    if num_bytes > room_bytes:
        raise QuestionError(
            f"--rehearse would hold up to {num_bytes / 2**30:.3g} GiB for {target!r} ({num_parameters:,} parameters in "
            f"float64 on {shrink_plan(plan).world_size} simulated ranks), more than half of this machine's memory: "
            "name a smaller copy of the model, with fewer and narrower layers (num_hidden_layers, hidden_size ... of a "
            "config.json), plan it with the same --constraint, --save it, and rehearse that"
        )


def _with_values(leaf: Any) -> Any:
    """Normal numbers; integers are 0 or 1, which most models take for an index, a class or a flag."""
    if not isinstance(leaf, Tensor) or not leaf.is_meta:
        return leaf
    generator = torch.Generator().manual_seed(0)
    if leaf.is_floating_point():
        return torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf.dtype)
    return torch.randint(0, 2, leaf.shape, generator=generator, device="cpu").to(leaf.dtype)
