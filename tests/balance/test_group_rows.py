"""Batches shared out among groups of devices of unlike size."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.balance import BatchPlanner
from autopar.balance.expectation import expected_step
from autopar.balance.group_kinds import kinds_worth_having, with_more_lengths
from autopar.balance.group_rows import _pack, assign_groups
from autopar.balance.lengths import Lengths
from autopar.plan.prediction import GroupRow, LengthPlan, LengthPrediction, RowCost
from tests.balance.assignments import plan_of

KINDS = (GroupRow(4, 64, 16.5, 0.01), GroupRow(2, 32, 16.2, 0.02), GroupRow(1, 16, 16.0, 0.04))


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("devices", [4, 8, 16])
def test_every_sequence_has_a_place_in_a_row_that_holds_it(devices: int, packs: bool) -> None:
    random = np.random.default_rng(devices)
    for _ in range(40):
        lengths = random.integers(1, 1 + random.choice([8, 32, 64]), random.integers(0, 40))
        found = assign_groups(KINDS, 3.0, devices, lengths, packs=packs)
        if found is None:
            assert devices == 4
            assert lengths.max(initial=0) > 32  # a group of all has no other beside it
            continue
        assert found.degrees.sum() == devices
        assert (np.diff(found.degrees) <= 0).all()
        assert len(set(found.degrees.tolist())) > 1
        for group, kind in enumerate(found.unlike):
            rows = [row for row in found.rows_of(group) if row]
            assert all(sum(lengths[index] for index in row) <= kind.tokens for row in rows)
            assert packs or all(len(row) == 1 for row in rows)
            pairs = sum(float(lengths[index]) ** 2 for row in rows for index in row)
            assert found.work_s[group] == pytest.approx(len(rows) * kind.row_s + kind.pair_s * pairs)
        rows = [found.rows_of(group) for group in range(len(found.degrees))]
        assert sorted(itertools.chain(*itertools.chain(*rows))) == list(range(len(lengths)))
        assert found.bound_s <= found.largest_s * (1 + 1e-12)
        assert found.step_time_s == pytest.approx(3.0 + found.work_s.max(initial=0.0))
        ranks = [found.groups_of(rank) for rank in range(devices)]
        assert ranks == [[group] for group, degree in enumerate(found.degrees) for _ in range(degree)]


def test_each_sequence_goes_to_the_group_that_would_finish_it_first() -> None:
    random = np.random.default_rng(1)
    counts = (1, 2, 8)
    kinds = [kind for kind, count in zip(KINDS, counts, strict=True) for _ in range(count)]
    for fill_s in (0.0, 5.0):
        tokens = random.integers(1, 65, 60)
        order = np.argsort(-tokens, kind="stable")
        rows: list[list[int]] = [[] for _ in kinds]  # tokens left in each row
        load = [0.0] * len(kinds)
        expected: list[int] = []
        for length in tokens[order].tolist():
            done_s = [
                kind.pair_s * length**2 + own_s + (not own) * fill_s
                + (max(own, default=0) < length) * kind.row_s + (np.inf if kind.tokens < length else 0.0)
                for kind, own, own_s in zip(kinds, rows, load, strict=True)
            ]  # fmt: skip
            group = int(np.argmin(done_s))
            own = rows[group]
            fullest = min((left, row) for row, left in enumerate([*own, kinds[group].tokens]) if left >= length)[1]
            rows[group] = [*own, *[kinds[group].tokens] * (fullest == len(own))]
            rows[group][fullest] -= length
            load[group] = done_s[group]
            expected.append(group)
        own_kinds = [replace(kind, fill_s=fill_s) for kind in KINDS]
        placed, found, _, work_s = _pack(own_kinds, counts, tokens, order, np.inf)
        assert placed == len(tokens)
        assert found[order].tolist() == expected
        assert work_s == pytest.approx(load)


def test_a_long_sequence_among_short_ones_gets_a_group_of_its_own() -> None:
    found = assign_groups(KINDS, 0.0, 8, np.array([64, *[16] * 4]))
    assert found is not None
    assert found.degrees[0] == 4
    assert [row for row in found.rows_of(0) if row] == [[0]]
    assert found.largest_s == pytest.approx(16.5 + 0.01 * 64**2)  # nobody is done later than it


@pytest.mark.parametrize(
    ("devices", "fill_s", "packs"),
    [(4, 0.0, True), (8, 0.0, True), (8, 5.0, True), (16, 0.0, True), (8, 0.0, False), (8, 5.0, False)],
)
def test_devices_in_several_groups_compute_every_sequence_once_in_the_time_that_is_said(
    devices: int, fill_s: float, packs: bool
) -> None:
    random = np.random.default_rng(devices)
    kinds = tuple(replace(kind, fill_s=fill_s) for kind in KINDS)  # in which stages fill and drain, once for a group
    faster = 0
    for _ in range(40):
        lengths = random.integers(1, 1 + random.choice([16, 32, 64]), random.integers(1, 40))
        alone, found = (
            assign_groups(kinds, 3.0, devices, lengths, nests=nests, packs=packs) for nests in (False, True)
        )
        if found is None or not found.starts:
            assert (alone is None) == (found is None)
            continue
        assert alone is not None
        faster += found.step_time_s < 0.98 * alone.step_time_s
        assert found.step_time_s < alone.step_time_s
        assert found.bound_s <= found.largest_s * (1 + 1e-12)
        assert len({kind.tokens for kind in found.unlike}) > 1
        load_s = np.zeros(devices)
        for group, (kind, start) in enumerate(zip(found.unlike, found.starts, strict=True)):
            assert (found.degrees[group], start % kind.degree) == (kind.degree, 0)
            rows = [row for row in found.rows_of(group) if row]
            assert rows
            assert all(sum(lengths[index] for index in row) <= kind.tokens for row in rows)
            assert packs or all(len(row) == 1 for row in rows)
            pairs = sum(float(lengths[index]) ** 2 for row in rows for index in row)
            work_s = fill_s + len(rows) * kind.row_s + kind.pair_s * pairs
            assert found.work_s[group] == pytest.approx(work_s)
            load_s[start : start + kind.degree] += work_s
        assert found.load_s == pytest.approx(load_s)
        assert found.step_time_s == pytest.approx(3.0 + load_s.max())
        rows = [found.rows_of(group) for group in range(len(found.degrees))]
        assert sorted(itertools.chain(*itertools.chain(*rows))) == list(range(len(lengths)))
        for rank in range(devices):
            own = found.groups_of(rank)
            assert own == [g for g, s in enumerate(found.starts) if s <= rank < s + found.degrees[g]]
            order = [(found.degrees[group], found.unlike[group].tokens) for group in own]
            assert order == sorted(order, reverse=True)  # the order in which ranks run them
    assert faster


def test_devices_share_a_long_sequence_and_go_on_alone() -> None:
    kinds = (GroupRow(2, 16, 2.0, 0.0), GroupRow(1, 8, 1.0, 0.0))
    lengths = np.array([16, *[8] * 8])
    alone, found = (assign_groups(kinds, 0.0, 4, lengths, nests=nests) for nests in (False, True))
    assert alone is not None
    assert found is not None
    assert (alone.largest_s, found.largest_s) == (4.0, 3.0)
    assert found.starts[0] == 0
    assert found.runs_as == "groups of 1 x 2 (16), then 4 x 1 (8)"
    assert (found.mean_s, found.imbalance) == (3.0, 1.0)


def test_rows_of_more_lengths_are_had_if_batches_use_them() -> None:
    more = with_more_lengths(KINDS)
    assert [(kind.degree, kind.tokens) for kind in more] == [
        (4, 64), (4, 48), (2, 32), (2, 24), (1, 16), (1, 12), (1, 8), (1, 6), (1, 4), (1, 3),
    ]  # fmt: skip
    assert [kind.row_s / kind.tokens for kind in more[:2]] == [KINDS[0].row_s / 64] * 2
    random = np.random.default_rng(0)
    batches = [np.minimum(64, 3 + random.geometric(0.2, 16)) for _ in range(20)]
    kept = kinds_worth_having(more, 8, batches)
    assert kept[0] == KINDS[0]
    assert 1 < len(kept) <= 8
    assert set(kept) <= set(more)
    before_s, after_s = (
        sum(found.largest_s for batch in batches if (found := assign_groups(kinds, 0.0, 8, batch))) for kinds in
        (KINDS, kept)
    )  # fmt: skip
    assert after_s < 0.95 * before_s


def test_groups_are_taken_where_they_are_faster() -> None:
    row = RowCost(ranks=2, rows=1, tokens=64, token_s=0.25, pair_s=0.01, step_s=5.0)
    plan = plan_of(row, 8)
    alone = LengthPrediction(plans=(LengthPlan(row),), groups=KINDS, coupling_s=6.0)
    planner = BatchPlanner(replace(plan, prediction=replace(plan.prediction, lengths=alone)))
    batches = [np.array([64, *[15] * 12]), np.array([60, 50, 40, 50])]
    mixed, long = (planner.assign(batch) for batch in batches)
    assert mixed.unlike
    assert not long.unlike
    assert not BatchPlanner(plan).assign(batches[0]).unlike
    assert mixed.step_time_s < BatchPlanner(plan).assign(batches[0]).step_time_s
    found = expected_step([plan], plan, Lengths.of([64]), batches, KINDS, 6.0)
    assert (found.group_share, found.group_step_s) == (0.5, pytest.approx(mixed.step_time_s))
    assert found.step_time_s == pytest.approx((mixed.step_time_s + long.step_time_s) / 2)
    assert sum(dict(found.gains).values()) == pytest.approx(found.static_s - found.step_time_s)


def random_lengths(random: np.random.Generator, longest: int) -> np.ndarray:
    """None, one, all equal, one of the longest among the shortest, or any up to some length."""
    count = int(random.integers(1, 30))
    mixes = (
        np.zeros(0, np.int64), np.array([longest]), np.full(count, random.integers(1, longest + 1)),
        np.array([longest, *[1] * count]), random.integers(1, 1 + random.choice([2, longest // 2, longest]), count),
    )  # fmt: skip
    return mixes[random.choice(len(mixes), p=[0.02, 0.08, 0.2, 0.2, 0.5])]


@pytest.mark.slow
def test_a_thousand_batches_are_assigned_once_and_within_memory() -> None:
    random = np.random.default_rng(5)
    ran: set[str] = set()
    for number in range(1000):
        world, packs = int(random.choice([2, 4, 8])), bool(random.integers(2))
        rows = [
            RowCost(world // 2, 2, 64, 0.3, 0.01, 1.0, 0.5, int(random.integers(1, 3)), 10.0, 4.0),
            RowCost(world, 2, 32, 0.3, 0.02, 1.0, 0.5, int(random.integers(1, 3)), 10.0, 2.0),
        ]
        kinds = tuple(kind for kind in KINDS if kind.degree < world) if world > 2 else ()
        kinds = (replace(kinds[0], tokens=64), *kinds[1:]) if kinds else ()
        family = LengthPrediction(
            plans=tuple(map(LengthPlan, rows)), groups=kinds, coupling_s=3.0, nests=number % 2 > 0
        )
        plan = plan_of(rows[0], world)
        plan = replace(plan, memory_limit_bytes=30.0, prediction=replace(plan.prediction, lengths=family))
        planner, lengths = BatchPlanner(plan, packs=packs), random_lengths(random, 64)
        found = planner.assign(lengths)
        assert str(planner.assign(lengths.tolist()).group) == str(found.group)
        rows_of = [found.rows_of(group) for group in range(len(found.degrees))]
        assert sorted(itertools.chain(*itertools.chain(*rows_of))) == list(range(len(lengths)))
        for group, own in enumerate(rows_of):
            room = found.unlike[group].tokens if found.unlike else found.row_cost.tokens
            assert all(sum(lengths[index] for index in row) <= room for row in own)
            assert packs or all(len(row) <= 1 for row in own)
        members = [[rank for rank in range(world) if group in found.groups_of(rank)] for group in range(len(rows_of))]
        assert [len(own) for own in members] == found.degrees.tolist()
        # All ranks of a group have computed the same rows before, so that none waits for another in any order.
        for group, own in enumerate(members):
            assert len({tuple(each for each in found.groups_of(rank) if each < group) for rank in own}) == 1
        if not found.unlike:  # rows of a group come one at a time
            cost = found.row_cost
            at_once_bytes = cost.fixed_bytes + found.at_once * cost.row_bytes
            assert found.rows % found.at_once == 0
            assert found.at_once <= cost.rows or at_once_bytes <= planner.limit_bytes
        ran.add("overlapping" if found.starts else "groups" if found.unlike else str(found.row_cost.tokens))
    assert ran == {"overlapping", "groups", "64", "32"}
