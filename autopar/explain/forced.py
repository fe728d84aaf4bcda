"""What each forced choice costs: the same question with one constraint more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.explain.planner import Answer, Planner

__all__ = ["ForcedRow", "faster", "forced_choices"]

_ROUNDING = 1e-6


@dataclass(frozen=True)
class ForcedRow:
    """A constraint, and the best plan that meets it; without one, the problem."""

    constraint: str
    step_s: float | None = None
    peak_bytes: float = 0.0
    problem: str = ""


def forced_choices(planner: Planner, answer: Answer, budget_s: float) -> Iterator[ForcedRow]:
    """The usual alternatives to what `answer` decides, as long as there is time for one more that takes as long."""
    started = time.perf_counter()
    longest_s = 0.0
    for constraint in _alternatives(answer):
        if time.perf_counter() - started + longest_s > budget_s:
            yield ForcedRow(constraint, problem=f"not looked at: {budget_s:g} s are over (--why-seconds)")
            continue
        before = time.perf_counter()
        asked = replace(answer.asked, constraints=(*answer.asked.constraints, constraint))
        try:
            plan = planner.answer(asked).plan
        except AutoparError as error:
            yield ForcedRow(constraint, problem=f"{type(error).__name__}: {str(error).split('. ')[0]:.90}")
            continue
        longest_s = max(longest_s, time.perf_counter() - before)
        yield ForcedRow(constraint, plan.step_time_s, plan.peak_memory_bytes)


def faster(rows: Iterable[ForcedRow], step_s: float) -> tuple[ForcedRow, ...]:
    """Those that are faster than the plan after all: the less there is to look at, the more of it a search sees."""
    return tuple(row for row in rows if row.step_s is not None and row.step_s < step_s * (1 - _ROUNDING))


def _alternatives(answer: Answer) -> list[str]:
    """Constraints on what the user has left open."""
    cluster, plan = answer.asked.cluster, answer.plan
    said = {text.partition("=")[0].strip() for text in answer.asked.constraints}
    node = min(cluster.devices_per_node, cluster.world_size)
    found = ["zero=0", "zero=3", "recompute=none", "recompute=full"]
    if node > 1:
        found += [f"tensor={node}"] + ([f"tensor={node // 4}"] if node % 4 == 0 and node > 4 else [])
    if cluster.world_size > 1:
        found += ["pipeline=1"] if plan.stages else ["pipeline=2"]
    return [text for text in found if text.partition("=")[0] not in said]
