"""The expected time of a step over a distribution of lengths, with one plan and with the fastest plan for each batch.

Batches are drawn at random and distributed over data-parallel ranks as `BatchPlanner` does.  The step time of a batch b
with the rows of a plan p is

    step_s[p] + microbatch_s[p] * microbatches + place_s[p] * rows * tokens[p] + the largest attention of a rank

and is infinite if a sequence of b is longer than a row of p.  The expected step time of a family is the mean over
batches of the minimum over its plans; that of a single plan is the mean of its own step times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.balance.assignment import Assignment
from autopar.balance.group_rows import assign_groups
from autopar.balance.lengths import Lengths
from autopar.balance.planner import BatchPlanner
from autopar.plan import Plan
from autopar.plan.headline import describe_usual
from autopar.plan.prediction import GroupRow, LengthPlan, LengthPrediction

__all__ = ["DRAWN", "draw_batches", "expected_step", "rows_worth_planning", "sequences_of_step"]

DRAWN = 64  # batches: the mean of what is saved is then known to an eighth of its spread from batch to batch
_RARE = 0.02  # of batches: rows that no more fit into are not worth a search, which takes seconds to minutes
_MOST_PLANS = 4  # each takes a trace and a search


def draw_batches(lengths: Lengths, sequences: int, count: int = DRAWN) -> list[np.ndarray]:
    """`count` batches of so many `sequences`: of each ``[sequences]`` lengths; equal arguments give equal batches."""
    random = np.random.default_rng(0)
    return [lengths.draw(sequences, random) for _ in range(count)]


def sequences_of_step(lengths: Lengths, rows: int, tokens: int, *, packs: bool) -> int:
    """How many sequences a step has whose example has so many `rows` of `tokens`: one in each row, or if they share
    rows as many as have that many tokens on average.
    """
    return max(1, round(rows * tokens / lengths.mean)) if packs else rows


def rows_worth_planning(batches: Sequence[np.ndarray], tokens: int) -> tuple[int, ...]:
    """Lengths of rows, `tokens` first, each half of the one before, that enough batches fit into."""
    longest = np.array([batch.max() for batch in batches])
    sizes = [tokens]
    while len(sizes) < _MOST_PLANS and sizes[-1] % 2 == 0 and np.mean(longest <= sizes[-1] // 2) > _RARE:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def expected_step(
    family: Sequence[Plan],
    static: Plan,
    lengths: Lengths,
    batches: Sequence[np.ndarray],
    groups: Sequence[GroupRow] = (),
    coupling_s: float = 0.0,
    *,
    nests: bool = False,
    packs: bool = True,
) -> LengthPrediction:
    """What a step takes by the fastest of a `family`, whose first plan holds every sequence, and by `static` alone.

    With `groups`, steps in which groups of devices differ are among them; these take `coupling_s` once, and with
    `nests` devices may be in several groups.  `packs`: whether sequences share rows.
    """
    planners = [BatchPlanner(plan, packs=packs) for plan in family]
    own = [[_assigned(planner, batch) for planner in planners] for batch in batches]
    for assignments, batch in zip(own, batches, strict=True):
        devices = planners[0].devices_of_stage
        mixed = assign_groups(groups, coupling_s, devices, batch, nests=nests, packs=packs) if groups else None
        assignments.append(mixed)
    times_s = np.array([[np.inf if each is None else each.step_time_s for each in assignments] for assignments in own])
    chosen: np.ndarray = times_s.argmin(axis=1)
    shares = [float((chosen == place).mean()) for place in range(len(family) + 1)]
    means_s = [
        float(times_s[chosen == place, place].mean()) if shares[place] else 0.0 for place in range(len(family) + 1)
    ]
    fastest = np.array([_parts(own[number][int(chosen[number])]) for number in range(len(batches))])
    alone = BatchPlanner(static, packs=packs)
    before = np.array([_parts(alone.assign(batch)) for batch in batches])
    saved_s: np.ndarray = before.sum(axis=1) - fastest.sum(axis=1)
    plans = tuple(
        LengthPlan(
            plan.prediction.row, shares[place], means_s[place], describe_usual(plan.decisions) if plan.layers else ""
        )
        for place, plan in enumerate(family)
    )
    return LengthPrediction(
        str(lengths),
        len(batches[0]),
        len(batches),
        plans,
        float(fastest.sum(axis=1).mean()),
        float(before.sum(axis=1).mean()),
        float(saved_s.std()) / len(batches) ** 0.5,
        tuple(zip(_PARTS, map(float, (before - fastest).mean(axis=0)), strict=True)),
        tuple(groups),
        coupling_s,
        shares[-1],
        means_s[-1],
        static.prediction.row,
        nests,
        sum(1 for assignments, place in zip(own, chosen, strict=True) if _is_nested(assignments[int(place)]))
        / len(batches),
        packs,
    )


def _is_nested(assignment: Assignment | None) -> bool:
    return assignment is not None and bool(assignment.starts)


def _assigned(planner: BatchPlanner, batch: np.ndarray) -> Assignment | None:
    return planner.assign(batch) if batch.max() <= planner.longest else None


_PARTS = ("tokens", "places without a token", "attention", "waiting for the most work", "parameters")


def _parts(assignment: Assignment | None) -> list[float]:
    """The seconds of a step, by `_PARTS`."""
    assert assignment is not None  # the first plan of a family holds every sequence
    if assignment.unlike:
        return _parts_of_groups(assignment)
    row, ranks = assignment.row_cost, len(assignment.degrees)
    tokens_s = row.place_s * float(assignment.lengths.sum()) / ranks
    mean_s = float(assignment.work_s.mean())
    computed_s = row.place_s * assignment.rows * row.tokens
    return [tokens_s, computed_s - tokens_s, mean_s, assignment.largest_s - mean_s, assignment.fixed_s]


def _parts_of_groups(assignment: Assignment) -> list[float]:
    """The same where groups differ: what they compute is a mean over devices."""
    degrees: np.ndarray = assignment.degrees / assignment.devices
    row_s = np.array([each.row_s for each in assignment.unlike])
    token_s = row_s / np.array([each.tokens for each in assignment.unlike])
    pairs = np.unique(np.stack([assignment.group, assignment.row]), axis=1)[0]
    counts: np.ndarray = np.bincount(pairs, minlength=len(row_s))
    rows_s = counts * row_s
    fill_s = np.where(counts > 0, np.array([each.fill_s for each in assignment.unlike]), 0.0)
    tokens_s = float((token_s * degrees)[assignment.group] @ assignment.lengths)
    attention_s = float((assignment.work_s - rows_s - fill_s) @ degrees)
    mean_s = float((assignment.work_s - fill_s) @ degrees)
    places_s = float(rows_s @ degrees) - tokens_s
    return [tokens_s, places_s, attention_s, assignment.largest_s - mean_s, assignment.fixed_s]
