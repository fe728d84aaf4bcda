"""An edited plan: whether it fits the model, what it costs now, and what the edit costs against the best plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import PlanFormatError, QuestionError
from autopar.explain.asked import Asked
from autopar.explain.documents import describe_plan
from autopar.explain.editing import Edit, apply_edits
from autopar.explain.planner import Answer, Planner
from autopar.fit import check_fit
from autopar.lower.compat import leaves_of
from autopar.lower.schedules import schedule_actions
from autopar.plan import Plan
from autopar.search.repricing import reprice
from autopar.verify import VerificationReport, verify

__all__ = ["Checked", "check_plan", "load_plan", "rehearse"]


@dataclass(frozen=True, eq=False)
class Checked:
    """An edited plan that runs on the model, priced again, beside the best plan.

    `before` is the plan as it was read, or the best one, before what ``--set`` asked for.
    """

    best: Answer
    before: Plan
    answer: Answer

    @property
    def fits(self) -> bool:
        """Whether it fits in memory."""
        return self.answer.plan.peak_memory_bytes <= self.best.plan.memory_limit_bytes

    @property
    def verdict(self) -> str:
        """What the edit costs, in a sentence."""
        plan, best = self.answer.plan, self.best.plan
        share = plan.step_time_s / best.step_time_s - 1
        text = f"it runs on this model and these devices; against the best plan it costs {share:+.1%} of the step time"
        if not self.fits:
            peak, limit = plan.peak_memory_bytes / 2**30, best.memory_limit_bytes / 2**30
            text += f", but it does not fit: {peak:.3g} GiB per device of {limit:.3g} GiB"
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
    planner: Planner, asked: Asked, path: str, edits: Sequence[Edit] = (), *, may_lack: bool = False
) -> Checked:
    """Check and price the plan at `path` after these edits.

    Args:
        planner: of the model.
        asked: what the best plan is searched for.
        path: of the plan.
        edits: see `autopar.explain.editing`.
        may_lack: where there is no such file, take the best plan.

    Raises:
        PlanFormatError: the file is no plan.
        PlanMismatchError: it is for another model, other inputs or another number of devices.
        QuestionError: an edit can't be made.
    """
    best = planner.answer(asked)
    before = best.plan if may_lack and not Path(path).exists() else load_plan(path)
    world_size = asked.cluster.world_size
    check_fit(before, best.program, world_size)
    edited = apply_edits(before, best.program, edits)
    check_fit(edited, best.program, world_size)
    before, priced = (
        replace(
            reprice(best.program, plan, best.prices, best.training, schedule_actions),
            memory_limit_bytes=best.plan.memory_limit_bytes,
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
    try:
        return Plan.load(path)
    except OSError as error:
        raise QuestionError(
            f"plan {path!r} can't be read: {error.strerror}; write one with TARGET --cluster ... --save {path}"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanFormatError(f"plan {path!r} is no text: name a file that --save or Plan.save wrote") from error


def rehearse(planner: Planner, asked: Asked, plan: Plan) -> VerificationReport:
    """Run the plan on simulated ranks in this process and compare with one device (`autopar.verify`).

    Raises:
        QuestionError: the target has no values.
        VerificationError: they compute something else.
    """
    target = planner.model(asked)
    tensors = [*target.model.parameters(), *target.model.buffers(), *leaves_of(target.example_inputs)]
    if any(getattr(tensor, "is_meta", False) for tensor in tensors):
        raise QuestionError(
            f"--rehearse runs {planner.target!r}, so it needs values, but it is on the meta device: name a factory "
            "(file.py:factory) that returns a model and inputs with values, small enough for this machine"
        )
    return verify(target.model, plan, target.example_inputs)
