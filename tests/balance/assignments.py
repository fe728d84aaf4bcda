"""Plans by hand and brute force, for tests of assignments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.plan import Plan
from autopar.plan.decisions import Decisions
from autopar.plan.prediction import Prediction, RowCost


def plan_of(row: RowCost, devices: int | None = None) -> Plan:
    """A plan that says nothing but what rows cost."""
    return Plan(Decisions("", devices or row.ranks, 1, (), (), (), ()), Prediction(row=row))


def least_rows_and_pairs(lengths: Sequence[int], ranks: int, room: int) -> tuple[int, int]:
    """The fewest rows a rank that hold all, and then the least sum of squares of the rank with the most; tried out."""
    for rows in itertools.count(1):
        best = min(
            (
                max(sum(n * n for n, place in zip(lengths, places, strict=True) if place // rows == rank)
                    for rank in range(ranks))
                for places in itertools.product(range(ranks * rows), repeat=len(lengths))
                if all(
                    sum(n for n, place in zip(lengths, places, strict=True) if place == row) <= room
                    for row in range(ranks * rows)
                )
            ),
            default=None,
        )  # fmt: skip
        if best is not None:
            return rows, best
    raise AssertionError
