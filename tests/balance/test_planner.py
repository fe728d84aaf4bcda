"""Assignments: every sequence once, within the room of rows, and as even as can be."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.balance import BatchPlanner
from autopar.errors import LengthError
from autopar.plan import Plan
from autopar.plan.prediction import RowCost
from tests.balance.assignments import least_rows_and_pairs, plan_of

ROW = RowCost(ranks=2, rows=2, tokens=12, token_s=1.0, pair_s=1.0)


@pytest.mark.parametrize("seed", range(30))
def test_few_sequences_are_shared_out_as_well_as_can_be(seed: int):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 13, random.integers(1, 7)).tolist()
    found = BatchPlanner(plan_of(replace(ROW, rows=1))).assign(lengths)
    rows, pairs = least_rows_and_pairs(lengths, 2, 12)
    assert found.is_exact
    assert (found.rows, found.largest_s) == (rows, pytest.approx(pairs))
    assert found.bound_s <= pairs * (1 + 1e-12)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("packs", [True, False])
def test_every_sequence_has_one_place_with_room_for_it(packs: bool):
    random = np.random.default_rng(0)
    for _ in range(1000):
        ranks, own, microbatches = (int(random.integers(1, most)) for most in (9, 4, 3))
        row = replace(ROW, ranks=ranks, rows=own, tokens=64, microbatches=microbatches)
        lengths = random.integers(1, 1 + random.choice([1, 8, 64]), random.integers(0, 60))
        found = BatchPlanner(plan_of(row), packs=packs).assign(lengths)
        rows = [row for group in range(row.ranks) for row in found.rows_of(group)]
        assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
        assert packs or all(len(row) <= 1 for row in rows)
        assert microbatches == 1 or found.rows <= own or found.rows % own == 0  # whole microbatches
        work = [sum(float(lengths[i]) ** 2 for r in found.rows_of(group) for i in r) for group in range(row.ranks)]
        assert work == pytest.approx(found.work_s.tolist())
        assert found.bound_s <= found.largest_s * (1 + 1e-12)


def test_microbatches_cost_what_is_gathered_for_each_of_them():
    plan = plan_of(replace(ROW, ranks=1, rows=1, pair_s=0.0, microbatch_s=5.0, row_bytes=1.0))
    found = BatchPlanner(plan).assign([12, 12, 12])
    assert (found.rows, found.at_once, found.step_time_s) == (3, 3, 36 + 5)
    found = BatchPlanner(replace(plan, memory_limit_bytes=2.5)).assign([12, 12, 12])  # for two rows
    assert (found.rows, found.at_once, found.step_time_s) == (3, 1, 36 + 3 * 5)
    assert BatchPlanner(replace(plan, memory_limit_bytes=2.5)).assign([12, 12]).at_once == 2


def test_the_same_lengths_give_the_same_places():
    lengths = np.random.default_rng(3).integers(1, 65, 200)
    planner = BatchPlanner(plan_of(replace(ROW, ranks=8, tokens=64)))
    first, second = planner.assign(lengths), planner.assign(lengths.tolist())
    assert (first.group == second.group).all()
    assert (first.row == second.row).all()


def test_many_sequences_are_as_even_as_said():
    lengths = np.random.default_rng(0).integers(1, 4097, 2000)
    found = BatchPlanner(plan_of(replace(ROW, ranks=16, tokens=8192))).assign(lengths)
    assert found.imbalance < 1.001
    assert found.gap < 1e-3
    assert "2000 sequences" in str(found)


def test_several_batches_are_spread_over_as_many_steps():
    lengths = [12, 12, 1, 1, 1, 1, 1, 1]
    found = BatchPlanner(plan_of(ROW)).assign(lengths, batches=2)
    assert len(found.degrees) == 4
    assert found.work_s.tolist() == sorted(found.work_s.tolist(), reverse=True)
    assert found.work_s[:2].tolist() == [144, 144]  # the long ones meet in one step
    assert sum(found.work_s[2:]) == 6


def grouped(degrees: tuple[int, ...], devices: int, tokens: int = 16) -> BatchPlanner:
    """Groups of `degrees`, each device of which has room for `tokens`; communication makes large ones dearer."""
    rows = [RowCost(devices // d, 1, tokens * d, (1 + 0.1 * (d > 1)) / d, 0.1 / d) for d in degrees]
    return BatchPlanner([plan_of(row, devices) for row in rows])


def seconds(planner: BatchPlanner, degree: int, lengths: list[int]) -> float:
    cost = next(cost for cost in planner.costs if cost.degree == degree)
    return float(cost.seconds(np.array(lengths)).sum()) if max(lengths, default=0) <= cost.tokens else np.inf


@pytest.mark.parametrize("seed", range(12))
def test_groups_of_few_devices_are_the_best(seed: int):
    random = np.random.default_rng(seed)
    lengths = random.choice([1, 4, 16, 30, 60], random.integers(1, 5)).tolist()
    planner = grouped((1, 2, 4), 4)
    best = min(
        max(
            seconds(planner, degree, [n for n, place in zip(lengths, places, strict=True) if place == group])
            for group, degree in enumerate(degrees)
        )
        for degrees in [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
        for places in itertools.product(range(len(degrees)), repeat=len(lengths))
    )
    found = planner.assign(lengths)
    assert found.is_exact
    assert found.largest_s == pytest.approx(best)
    assert found.degrees.sum() == 4


def test_long_sequences_get_large_groups_and_short_ones_small():
    planner = grouped((1, 2, 4, 8), 16)
    lengths = [128, *[4] * 200]
    found = planner.assign(lengths)
    assert found.degrees[found.group[0]] == 8
    assert (found.degrees == 1).any()
    assert found.degrees.sum() <= 16
    assert found.imbalance < 1.5
    assert found.work_s.max() == pytest.approx(
        max(
            seconds(planner, int(degree), [lengths[i] for row in found.rows_of(group) for i in row])
            for group, degree in enumerate(found.degrees)
        )
    )


@pytest.mark.parametrize(
    ("step_s", "microbatch_s", "degrees", "seconds"),
    [
        (0.0, 0.0, [1, 1], 12.0),  # 8 beside 7 + 5, in two microbatches; on both devices 20 * 0.65
        (0.0, 0.5, [1, 1], 12.0 + 2 * 0.5),
        (0.0, 2.0, [2], 13.0 + 2.0),
        (4.0, 2.0, [1, 1], 12.0 + 2 * 2.0),
    ],
)
def test_groups_weigh_work_against_microbatches(
    step_s: float, microbatch_s: float, degrees: list[int], seconds: float
) -> None:
    alone = RowCost(2, 1, 10, 1.0, microbatch_s=microbatch_s)
    both = RowCost(1, 1, 20, 0.65, step_s=step_s, microbatch_s=microbatch_s)
    found = BatchPlanner([plan_of(row, 2) for row in (alone, both)]).assign([8, 7, 5])
    assert (found.degrees.tolist(), found.step_time_s) == (degrees, pytest.approx(seconds))


@pytest.mark.parametrize(
    ("microbatch_s", "rows", "seconds"),
    [(10.0, [[[0, 3]], [[1, 2]]], 68.0 + 10.0), (1.0, [[[0], []], [[1, 2], [3]]], 64.0 + 2 * 1.0)],
)
def test_fewer_microbatches_are_weighed_against_even_work(
    microbatch_s: float, rows: list[list[list[int]]], seconds: float
) -> None:
    row = RowCost(2, 1, 10, 0.0, 1.0, microbatch_s=microbatch_s)
    both = RowCost(1, 1, 20, 100.0, 1.0, microbatch_s=microbatch_s)  # too slow to be used
    found = BatchPlanner([plan_of(each, 2) for each in (row, both)]).assign([8, 5, 5, 2])
    assert [found.rows_of(group) for group in (0, 1)] == rows
    assert found.step_time_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 13], "sequence 1 of the batch has 13 tokens, more than a row of the plan holds \\(12\\)"),
        ([0, 1], "sequence 0 of the batch has length 0"),
        ([1, -4], "sequence 1 of the batch has length -4"),
        ([1.5], "whole numbers"),
        ([[1]], "one dimension"),
    ],
)
def test_lengths_that_can_not_be(lengths: list[int], message: str):
    with pytest.raises(LengthError, match=message):
        BatchPlanner(plan_of(ROW)).assign(lengths)


def test_plans_that_can_not_be():
    with pytest.raises(LengthError, match="doesn't say what a row costs"):
        BatchPlanner(plan_of(RowCost()))
    with pytest.raises(LengthError, match="divide each other"):
        grouped((2, 3), 6)


def test_nothing_to_do_is_an_empty_row():
    found = BatchPlanner(plan_of(ROW)).assign([])
    assert found.rows_of(0) == [[]]
    assert (found.imbalance, found.gap) == (1.0, 0.0)


def test_what_a_row_costs_is_saved_with_the_plan():
    plan = plan_of(ROW)
    assert Plan.from_json(plan.to_json()).prediction.row == ROW
