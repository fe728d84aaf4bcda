"""The balance of work between ranks, assigned and measured, and step times against the prices of lengths."""

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
        runs_as: rows or groups (`Assignment.runs_as`).
    """

    digest: int
    step_time_s: float = 0.0
    imbalance: float = 1.0
    runs_as: str = ""


@dataclass(frozen=True)
class Balance:
    """Of measured steps; `assigned` and `measured` are means over them.

    Args:
        assigned: largest over mean seconds that ranks compute, as predicted when the batch was shared out.
        measured: the same as measured, without the time in which a collective was under way.
        ratios: of each step, measured seconds over those predicted for its lengths.
        runs_as: of each step, the rows or groups that it ran as.
    """

    assigned: float
    measured: float
    ratios: tuple[float, ...]
    runs_as: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A line for each of both; of the second one more for each kind of step if there are several."""
        kinds: dict[str, list[float]] = {}
        for kind, ratio in zip(self.runs_as, self.ratios, strict=False):
            kinds.setdefault(kind, []).append(ratio)
        lines = [
            f"balance: largest / mean compute of ranks {self.measured:.2f}, {self.assigned:.2f} was assigned",
            f"lengths: steps took {_mean_and_range(self.ratios)} times what their lengths were priced at",
            *(f"  {kind}: {_mean_and_range(own)}, {len(own)} steps" for kind, own in kinds.items() if len(kinds) > 1),
        ]
        return "\n".join(lines)


def _mean_and_range(ratios: Sequence[float]) -> str:
    return f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"


def computing_s(timeline: StepTimeline, group: int) -> float:
    """Seconds in which this rank's layers ran and no collective was under way."""
    collectives = (*timeline.on(group, "communication"), *timeline.on(group, "parameters"))
    moved = sorted((e.start_s, e.stop_s) for e in collectives)
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
    steps: Sequence[tuple[Dealt, StepTimeline | None]],
    group: int,
    gather: Callable[[Sequence[int]], list[list[int]]],
) -> Balance | None:
    """Of steps whose batches a balanced loader gave; None without any.  Every rank calls it.

    Args:
        steps: what was assigned, and this rank's measured step; None: it was not measured here.
        group: the device group of this rank.
        gather: gives each rank's numbers to all ranks.
    """
    if not steps:
        return None
    own = [-1 if timeline is None else round(1e9 * computing_s(timeline, group)) for _, timeline in steps]
    ranks = list(zip(*gather(own), strict=True))
    known = [place for place, each in enumerate(ranks) if min(each) >= 0]
    if not known:
        return None
    spread = [max(ranks[place]) * len(ranks[place]) / max(1, sum(ranks[place])) for place in known]
    priced: list[tuple[Dealt, StepTimeline]] = []
    for place in known:
        dealt, timeline = steps[place]
        assert timeline is not None  # on no rank
        priced += [(dealt, timeline)] if dealt.step_time_s else []
    return Balance(
        statistics.fmean(steps[place][0].imbalance for place in known),
        statistics.fmean(spread),
        tuple(timeline.step_s / dealt.step_time_s for dealt, timeline in priced),
        tuple(dealt.runs_as for dealt, _ in priced),
    )
