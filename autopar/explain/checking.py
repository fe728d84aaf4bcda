"""An edited plan: whether it fits the model, what it costs now, and what the edit costs against the best plan."""

from __future__ import annotations

import json

from autopar.errors import QuestionError
from autopar.explain.asked import Asked
from autopar.explain.comparison import compare_plans
from autopar.explain.planner import Planner
from autopar.explain.text import Printer
from autopar.fit import check_fit
from autopar.lower.schedules import schedule_actions
from autopar.plan import Plan
from autopar.search.repricing import reprice

__all__ = ["check_plan_file"]


def check_plan_file(planner: Planner, asked: Asked, path: str, printer: Printer, *, as_json: bool = False) -> int:
    """Check the plan at `path`; returns the exit status: 0, or 1 if it does not fit in memory.

    Raises:
        PlanFormatError: the file is no plan.
        PlanMismatchError: it is for another model, other inputs or another number of devices.
    """
    try:
        edited = Plan.load(path)
    except OSError as error:
        raise QuestionError(f"plan {path!r} can't be read: {error.strerror}") from error
    best = planner.answer(asked)
    check_fit(edited, best.program, asked.cluster.world_size)
    priced = reprice(best.program, edited, best.prices, best.training, schedule_actions)
    fits = priced.peak_memory_bytes <= best.plan.memory_limit_bytes
    if as_json:
        printer.json(
            {
                "fits": fits,
                "plan": json.loads(priced.to_json()),
                "step_time_s": [best.plan.step_time_s, priced.step_time_s],
                "peak_memory_bytes": [best.plan.peak_memory_bytes, priced.peak_memory_bytes],
            }
        )
        return 0 if fits else 1
    printer.difference(f"The best plan -> {path}", best.plan, priced, compare_plans(best.plan, priced))
    slower = priced.step_time_s / best.plan.step_time_s - 1
    printer.line(f"{path} runs on this model and these devices; the edit costs {slower:+.1%} of the step time")
    if not fits:
        printer.line(
            f"but it does not fit: {priced.peak_memory_bytes / 2**30:.2f} GiB per device of "
            f"{best.plan.memory_limit_bytes / 2**30:.2f} GiB"
        )
    return 0 if fits else 1
