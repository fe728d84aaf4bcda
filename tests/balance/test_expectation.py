"""Expected steps over a distribution, and families of plans for it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar.balance import BatchPlanner, Lengths
from autopar.balance.expectation import draw_batches, expected_step, rows_worth_planning, sequences_of_step
from autopar.cluster import Cluster
from autopar.errors import LengthError
from autopar.plan import Plan
from autopar.plan.prediction import LengthPrediction, RowCost
from tests.balance.assignments import plan_of
from tests.data.test_balanced_models import Classes
from tests.models import make_llama, make_plain_gpt

LONG = RowCost(ranks=2, rows=1, tokens=64, token_s=1.0, pair_s=0.01, step_s=5.0)
SHORT = RowCost(ranks=4, rows=1, tokens=32, token_s=1.8, pair_s=0.018, step_s=5.0)


def test_batches_have_as_many_tokens_as_asked_for_on_average() -> None:
    lengths = Lengths.lognormal(mean=20, sigma=1.0, most=64)
    sequences = sequences_of_step(lengths, 10, 100, packs=True)
    batches = draw_batches(lengths, sequences, count=500)
    assert len({len(batch) for batch in batches}) == 1
    assert np.mean([batch.sum() for batch in batches]) == pytest.approx(1000, rel=0.05)
    assert all((a == b).all() for a, b in zip(batches, draw_batches(lengths, sequences, count=500), strict=True))


def test_rows_are_halved_as_long_as_batches_fit() -> None:
    batches = [np.array([longest]) for longest in [100] * 90 + [40] * 9 + [20]]
    assert rows_worth_planning(batches, 128) == (128, 64)  # one of a hundred fits into 32
    assert rows_worth_planning(batches, 125) == (125,)
    assert len(rows_worth_planning([np.array([1])], 1 << 20)) == 4


def test_each_batch_takes_the_fastest_of_a_family() -> None:
    lengths = Lengths.histogram({8: 0.97, 48: 0.03})
    batches = draw_batches(lengths, 11)
    family = [plan_of(LONG, 4), plan_of(SHORT, 4)]
    found = expected_step(family, family[0], lengths, batches)
    times = [[BatchPlanner(plan).assign(batch).step_time_s if batch.max() <= plan.prediction.row.tokens else np.inf
              for plan in family] for batch in batches]  # fmt: skip
    assert found.step_time_s == pytest.approx(np.min(times, axis=1).mean())
    assert found.static_s == pytest.approx(np.mean([long for long, _ in times]))
    assert sum(dict(found.gains).values()) == pytest.approx(found.static_s - found.step_time_s)
    assert sum(each.share for each in found.plans) == pytest.approx(1.0)
    assert 0 < found.plans[1].share < 1
    # One planner for the whole family chooses the same.
    whole = plan_of(LONG, 4)
    planner = BatchPlanner(replace(whole, prediction=replace(whole.prediction, lengths=found)))
    assert [planner.assign(batch).step_time_s for batch in batches] == pytest.approx(np.min(times, axis=1).tolist())
    with pytest.raises(LengthError, match=r"65 tokens, more than a row of the plan holds \(64\)"):
        planner.assign([65])


@pytest.mark.slow
def test_a_plan_for_a_distribution_is_a_family_over_one_storage() -> None:
    model = make_llama(layers=1)[0]
    ids = torch.zeros(2, 26, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(26).expand(2, -1)}
    cluster = Cluster.of("h100", devices_per_node=2)
    plan = autopar.plan(model, cluster, example, lengths={2: 100, 20: 2}, compile=False)
    expected = plan.prediction.lengths
    assert expected.plans[0].row.tokens == 26  # and 13, of which there is no half
    assert 1 + len(plan.other_calls) == len(expected.plans) <= 2
    assert expected.step_time_s <= expected.static_s * (1 + 1e-12)
    assert expected.plans[0].row == plan.prediction.row
    text = " ".join(str(plan).split())
    assert "expected step time" in text
    assert "the best plan for all of them" in text
    assert f"rows of {max(expected.plans, key=lambda each: each.share).row.tokens} tokens" in text
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(LengthError, match=r"has 27 tokens, but a row of the example inputs holds 26.*clipped\(26\)"):
        autopar.plan(model, cluster, example, lengths=Lengths.of([1, 27]))
    for wrong, message in ((3, "lengths is an int"), ({0: 1}, "at least 1"), ({-4: 1, 2: 1}, "at least 1")):
        with pytest.raises(LengthError, match=message):
            autopar.plan(model, cluster, example, lengths=wrong)  # type: ignore[arg-type]
    fixed, inputs = make_plain_gpt(batch=4)  # whose positions are as many as its places
    of_one = autopar.plan(fixed, cluster, inputs, lengths={2: 1}, compile=False, constraints="data=2")
    assert len(of_one.prediction.lengths.plans) == 1
    assert any("no plan for rows of 8 tokens" in note for note in of_one.notes)


def test_padded_rows_are_expected_as_they_are_assigned() -> None:
    model, rows = Classes(is_amount=False), 4
    form = {"patches": torch.zeros(rows, 16, 6), "kind": torch.zeros(rows, dtype=torch.int64)}
    example = form | {"attention_mask": torch.ones(rows, 16, dtype=torch.int64)}
    cluster = Cluster.of("h100", devices_per_node=2)
    lengths = Lengths.histogram({4: 0.95, 16: 0.05})
    plan = autopar.plan(model, cluster, example, lengths=lengths, compile=False, constraints="data=2")
    expected = plan.prediction.lengths
    assert not expected.packs
    assert expected.sequences == rows  # each has a row of its own, however short
    batches = draw_batches(lengths, rows)
    for planner in (BatchPlanner(plan), BatchPlanner(plan, packs=False)):
        times = [planner.assign(batch).step_time_s for batch in batches]
        assert np.mean(times) == pytest.approx(expected.step_time_s, rel=1e-12)
    # Rows half as long are as many, and attention of all places of a row takes as long whatever is in it.
    assert [each.row.tokens for each in expected.plans] == [16, 8, 4]
    assert [each.row.ranks * each.row.rows for each in expected.plans] == [rows] * 3
    static = replace(plan, prediction=replace(plan.prediction, lengths=LengthPrediction()))
    full = BatchPlanner(static, packs=False).assign([16] * rows)
    assert BatchPlanner(static, packs=False).assign([1] * rows).step_time_s == pytest.approx(full.step_time_s)
    assert full.step_time_s == pytest.approx(plan.step_time_s, rel=1e-6)
    assert "each sequence in a row of its own" in str(plan)
