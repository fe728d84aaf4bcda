"""Which sequences each device group computes, in which rows and microbatches, and how balanced that is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from autopar.plan.prediction import GroupRow, RowCost

__all__ = ["Assignment"]

_NO_ROWS = RowCost()


@dataclass(frozen=True, eq=False)
class Assignment:
    """The assignment of a batch: each sequence has a group and a row.

    Args:
        lengths: ``[n]`` tokens of each sequence.
        group: ``[n]`` the group of each sequence.
        row: ``[n]`` its row, counted within the group.
        degrees: ``[groups]`` devices of each group; the first group has the first devices, and so on.
        rows: rows that each group computes, empty ones included.
        work_s: ``[groups]`` seconds of each group's sequences, without padding.
        bound_s: a lower bound on the largest of `work_s`, over all assignments.
        is_exact: whether the largest of `work_s` is known to be the minimum for this number of rows.
        row_cost: of the plan whose rows these are; of groups of several degrees what is spent once a step.
        unlike: of each group what its rows cost, where groups run different programs in one step; their `work_s` then
            has all that they compute.
        at_once: rows of a group that are in one microbatch; 0: all.
        starts: ``[groups]`` the first device of each group, where a device is in several groups, whose rows it computes
            one after the other, in the order of groups; empty: groups are side by side.
        load_s: ``[devices]`` seconds of each device in all of its groups then.
    """

    lengths: np.ndarray
    group: np.ndarray
    row: np.ndarray
    degrees: np.ndarray
    rows: int
    work_s: np.ndarray
    bound_s: float
    is_exact: bool = False
    row_cost: RowCost = _NO_ROWS
    unlike: tuple[GroupRow, ...] = ()
    at_once: int = 0
    starts: tuple[int, ...] = ()
    load_s: tuple[float, ...] = ()

    @property
    def largest_s(self) -> float:
        """Seconds of the device with the most work, which all others wait for."""
        return max(self.load_s) if self.starts else float(self.work_s.max(initial=0.0))

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.load_s) if self.starts else int(self.degrees.sum())

    @property
    def mean_s(self) -> float:
        """Mean seconds of work of a device."""
        return float(self.work_s @ self.degrees) / max(1, self.devices)

    @property
    def fixed_s(self) -> float:
        """Seconds of the step that depend on no sequence."""
        return self.row_cost.fixed_s(self.rows, self.at_once or self.rows)

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of the step: rows are computed whole, whatever is in them."""
        return self.fixed_s + self.row_cost.place_s * self.rows * self.row_cost.tokens + self.largest_s

    @property
    def imbalance(self) -> float:
        """Largest over mean work of a device: 1 where none waits."""
        return self.largest_s / self.mean_s if self.mean_s else 1.0

    @property
    def gap(self) -> float:
        """By which part the largest work may be above the least possible: 0 if it is known to be that."""
        return 0.0 if self.is_exact or not self.bound_s else max(0.0, self.largest_s / self.bound_s - 1.0)

    @property
    def runs_as(self) -> str:
        """``"rows of 4,096"``, or ``"groups of 1 x 2 (4,096) + 2 x 1 (512)"``: how many, of so many devices, with rows
        of so many tokens; ``", then "`` in place of ``" + "`` where devices are in several groups.
        """
        if not self.unlike:
            return f"rows of {self.row_cost.tokens:,}"
        kinds = Counter((each.degree, each.tokens) for each in self.unlike)
        between = ", then " if self.starts else " + "
        return "groups of " + between.join(f"{n} x {degree} ({tokens:,})" for (degree, tokens), n in kinds.items())

    def rows_of(self, group: int) -> list[list[int]]:
        """The rows of a group in order, each with its sequences in order; some may be empty."""
        rows: list[list[int]] = [[] for _ in range(self.rows)]
        for index in np.flatnonzero(self.group == group).tolist():
            rows[int(self.row[index])].append(index)
        return rows

    def groups_of(self, rank: int) -> list[int]:
        """The groups that a device is in, in the order in which it computes their rows."""
        if not self.starts:
            return [int(np.searchsorted(np.cumsum(self.degrees), rank, side="right"))]
        starts = np.array(self.starts)
        return np.flatnonzero((starts <= rank) & (rank < starts + self.degrees)).tolist()

    def __str__(self) -> str:
        """What it comes to."""
        kinds = {int(d): int((self.degrees == d).sum()) for d in sorted(set(self.degrees.tolist()), reverse=True)}
        groups = " + ".join(f"{count} x {degree}" for degree, count in kinds.items())
        known = "the least possible" if self.is_exact else f"at most {self.gap:.1%} above the least possible"
        return (
            f"{len(self.lengths)} sequences, {int(self.lengths.sum()):,} tokens on {groups} devices: largest / mean "
            f"work {self.imbalance:.3f}, {known}"
        )
