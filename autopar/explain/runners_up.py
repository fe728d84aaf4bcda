"""The plans that came next: what else the search looked at, and by how much it loses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopar.plan import Plan
from autopar.search import ConsideredPlan
from autopar.search.chain.lagrangian import pareto_indices
from autopar.search.considered_plans import describe_plan

__all__ = ["RunnerUp", "pareto_front", "runners_up"]


@dataclass(frozen=True)
class RunnerUp:
    """The best plan of another kind than the chosen one.

    Args:
        what: how most of its layers run.
        step_time_s: simulated, or the sum that the search knows.
        peak_memory_bytes: per device.
        loses: how much slower it is than the plan, relative to that.
        is_simulated: whether its step was simulated; if not, overlapped communication is not subtracted.
    """

    what: str
    step_time_s: float
    peak_memory_bytes: float
    loses: float
    is_simulated: bool


def runners_up(considered: Iterable[ConsideredPlan], plan: Plan, most: int = 6) -> tuple[RunnerUp, ...]:
    """The fastest of each kind of plan within the limit, the chosen kind left out, fastest first."""
    chosen = describe_plan(plan).what
    best: dict[str, ConsideredPlan] = {}
    # Of a kind that was simulated, simulated numbers count.
    for each in sorted(considered, key=lambda each: (not each.is_simulated, each.step_time_s, each.peak_memory_bytes)):
        if each.peak_memory_bytes <= plan.memory_limit_bytes and each.what != chosen:
            best.setdefault(each.what, each)
    ranked = sorted(best.values(), key=lambda each: each.step_time_s)[:most]
    return tuple(
        RunnerUp(
            each.what, each.step_time_s, each.peak_memory_bytes, each.step_time_s / plan.step_time_s - 1,
            each.is_simulated,
        )
        for each in ranked
    )  # fmt: skip


def pareto_front(considered: Iterable[ConsideredPlan]) -> tuple[ConsideredPlan, ...]:
    """Those that no other beats in time and memory, fastest first."""
    every = list(considered)
    result = pareto_indices([each.step_time_s for each in every], [each.peak_memory_bytes for each in every])
    return tuple(every[index] for index in result)
