"""What each forced choice costs: the same question with one constraint more."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.explain.asked import Asked
from autopar.explain.planner import Planner
from autopar.plan import Plan

__all__ = ["ForcedRow", "faster", "forced_choices", "other_than"]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class ForcedRow:
    """Constraints (with ", " between them), and the best plan that meets them; without one, the problem."""

    constraint: str
    step_s: float | None = None
    peak_bytes: float = 0.0
    problem: str = ""


def forced_choices(planner: Planner, asked: Asked, budget_s: float) -> tuple[ForcedRow, ...]:
    """The usual alternatives to what a plan decides, as long as there is time for one more that takes as long."""
    rows: list[ForcedRow] = []
    started = time.perf_counter()
    longest_s = 0.0
    for constraint in _alternatives(asked):
        if time.perf_counter() - started + longest_s > budget_s:
            rows.append(ForcedRow(constraint, problem=f"not looked at: {budget_s:g} s are over (--why-seconds)"))
            continue
        before = time.perf_counter()
        try:
            plan = planner.answer(replace(asked, constraints=(*asked.constraints, *constraint.split(", ")))).plan
        except AutoparError as error:
            rows.append(ForcedRow(constraint, problem=f"{type(error).__name__}: {str(error).split('. ')[0]:.90}"))
            continue
        longest_s = max(longest_s, time.perf_counter() - before)
        rows.append(ForcedRow(constraint, plan.step_time_s, plan.peak_memory_bytes))
    return tuple(rows)


def other_than(rows: Iterable[ForcedRow], plan: Plan) -> tuple[ForcedRow, ...]:
    """Without the number of device groups that is the plan's anyway."""
    own = f"pipeline={plan.num_groups}" if plan.stages else "pipeline=1"
    return tuple(row for row in rows if row.constraint != own)


def faster(rows: Iterable[ForcedRow], step_s: float) -> tuple[ForcedRow, ...]:
    """Those that are faster than the plan after all: the less there is to look at, the more of it a search sees."""
    return tuple(row for row in rows if row.step_s is not None and row.step_s < step_s * (1 - _ROUNDING))


def _alternatives(asked: Asked) -> list[str]:
    """Constraints on what the user has left open, those first that differ most from what plans usually are.

    All but those on stages are without stages, unless the user says: a search without them takes a third of the time.
    """
    cluster = asked.cluster
    said = {text.partition("=")[0].strip() for text in asked.constraints}
    node = min(cluster.devices_per_node, cluster.world_size)
    found = ["zero=3", "zero=0", "recompute=full", "recompute=none"]
    if node > 1:
        found.insert(1, f"tensor={node}")
    if node % 4 == 0 and node > 4:
        found.append(f"tensor={node // 4}")
    found = [text for text in found if text.partition("=")[0] not in said]
    if cluster.world_size > 1 and "pipeline" not in said:
        return [*(f"pipeline=1, {text}" for text in found), "pipeline=1", "pipeline=2"]
    return found
