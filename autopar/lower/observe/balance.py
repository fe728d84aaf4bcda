"""How even the work of ranks was, beside what was assigned; how long steps took, beside what lengths were priced at."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.timeline import StepTimeline

__all__ = ["Balance", "Dealt", "compare_balance", "computing_s"]


class Dealt(NamedTuple):
    """A batch that a balanced loader has shared out.

    Args:
        digest: of the assignment, for ranks to compare.
        step_time_s: what the step is predicted to take.
        imbalance: largest over mean seconds that ranks are predicted to compute.
    """

    digest: int
    step_time_s: float = 0.0
    imbalance: float = 1.0


@dataclass(frozen=True)
class Balance:
    """Of measured steps; all but `ratios` are means over them.

    Args:
        assigned: largest over mean seconds that ranks compute, as predicted when the batch was shared out.
        measured: the same as measured, without the time in which a collective was under way.
        ratios: of each step, measured seconds over those predicted for its lengths.
    """

    assigned: float
    measured: float
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        """Both in a line each."""
        return (
            f"balance: largest / mean compute of ranks {self.measured:.2f}, {self.assigned:.2f} was assigned\n"
            f"lengths: steps took {statistics.fmean(self.ratios):.2f} times what their lengths were priced at "
            f"({min(self.ratios):.2f} to {max(self.ratios):.2f})"
        )


def computing_s(timeline: StepTimeline, group: int) -> float:
    """Seconds in which this rank's layers ran and no collective was under way."""
    moved = sorted((e.start_s, e.stop_s) for e in timeline.on(group, "communication"))
    total_s = 0.0
    for event in timeline.on(group, "compute"):
        if event.layer >= 0:
            total_s += event.stop_s - event.start_s - _covered_s(moved, event.start_s, event.stop_s)
    return total_s


def _covered_s(intervals: Sequence[tuple[float, float]], start_s: float, stop_s: float) -> float:
    """How much of one interval others cover, which are in the order of their starts."""
    covered_s, until_s = 0.0, start_s
    for begin_s, end_s in intervals:
        begin_s, end_s = max(begin_s, until_s), min(end_s, stop_s)
        if end_s > begin_s:
            covered_s, until_s = covered_s + end_s - begin_s, end_s
    return covered_s


def compare_balance(
    steps: Sequence[tuple[Dealt, StepTimeline]], group: int, gather: Callable[[Sequence[int]], list[list[int]]]
) -> Balance | None:
    """Of steps whose batches a balanced loader gave; None without any.  Every rank calls it.

    `gather` gives each rank's numbers to all ranks.
    """
    if not steps:
        return None
    own = [round(1e9 * computing_s(timeline, group)) for _, timeline in steps]
    ranks = gather(own)
    spread = [max(each) * len(each) / max(1, sum(each)) for each in zip(*ranks, strict=True)]
    return Balance(
        statistics.fmean(dealt.imbalance for dealt, _ in steps),
        statistics.fmean(spread),
        tuple(timeline.step_s / dealt.step_time_s for dealt, timeline in steps if dealt.step_time_s),
    )
