"""Balanced loaders that give each group of unlike size its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import autopar
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan import GroupPlan, Plan
from autopar.plan.prediction import GroupRow, LengthPlan, LengthPrediction, RowCost
from tests.balance.assignments import plan_of
from tests.data.sharded import FakeModel
from tests.data.test_balanced import Documents, check_equal_to_alone, small_llama
from tests.lower.groups.cases import family


@pytest.mark.slow
def test_a_loader_shares_a_batch_out_among_groups() -> None:
    found = family(small_llama(), 4, [(2, "tensor=2"), (1, "")], "data=4 zero=1")
    # Prices of so small a model don't say so: a group of two is as fast with a row twice as long.
    groups = (GroupRow(2, 16, 1.0, 1e-3), GroupRow(1, 8, 1.0, 2e-3))
    row = replace(found.plan.prediction.row, step_s=100.0)
    expected = LengthPrediction(plans=(LengthPlan(row),), groups=groups, coupling_s=0.5)
    plan = replace(found.plan, prediction=replace(found.plan.prediction, lengths=expected))
    found = replace(found, plan=plan)
    assert Plan.from_json(plan.to_json()) == plan

    def begin(talk: Communicator) -> Any:
        return found.build(talk)

    for lengths, shapes in (
        ([16, 7, 8, 3, 2], [(1, 16), (1, 16), (2, 8), (1, 8)]),
        ([16], [(1, 16)] * 2 + [(0, 8)] * 2),
    ):
        batches = check_equal_to_alone(found.model, Documents(lengths), begin, 4)
        assert sorted(tuple(batch["input_ids"].shape) for batch in batches) == sorted(shapes)
        assert all(torch.equal(x, batches[1][name]) for name, x in batches[0].items())
        ids = torch.cat([batches[rank]["input_ids"].flatten() for rank in (0, 2, 3)])
        assert {n: int((ids == n + 1).sum()) for n in range(len(lengths))} == dict(enumerate(lengths))


@pytest.mark.slow
def test_a_loader_gives_a_rank_rows_of_several_groups() -> None:
    found = family(small_llama(), 4, [(2, "sequence=2"), (1, "")], "data=4 zero=3")
    # Two ranks are done with the long one when all others are with two rows, and with another row when these are.
    groups = (GroupRow(2, 16, 2.0, 0.0), GroupRow(1, 8, 1.0, 0.0))
    row = replace(found.plan.prediction.row, step_s=100.0)
    expected = LengthPrediction(plans=(LengthPlan(row),), groups=groups, coupling_s=0.5, nests=True)
    plan = replace(found.plan, prediction=replace(found.plan.prediction, lengths=expected))
    found = replace(found, plan=plan)
    assert Plan.from_json(plan.to_json()) == plan

    def begin(talk: Communicator) -> Any:
        return found.build(talk)

    lengths = [16, *[8] * 8]
    for by_index in (True, False):
        batches = check_equal_to_alone(found.model, Documents(lengths), begin, 4, by_index=by_index)
        for rank, batch in enumerate(batches):
            rows = [16, 8] if rank < 2 else [8, 8, 8]
            assert [len(x) for x in batch["input_ids"].unbind()] == rows
            assert batch["input_ids"].is_nested == (rank < 2)


def test_groups_that_are_not_used_are_named(caplog: pytest.LogCaptureFixture) -> None:
    row = RowCost(ranks=1, rows=1, tokens=16, token_s=1.0, pair_s=0.0)
    plan = plan_of(row)
    prediction = LengthPrediction(plans=(LengthPlan(row),), groups=(GroupRow(1, 16, 1.0, 0.0),))
    plan = replace(
        plan, groups=(GroupPlan(16, plan.decisions),), prediction=replace(plan.prediction, lengths=prediction)
    )

    def load(talk: Communicator, arguments: dict[str, Any]) -> None:
        model: Any = FakeModel(talk)
        model.plan = plan
        model.call_inputs.example_forms = {
            "input_ids": ((2, 16), torch.int64), "pixel_values": ((3, 3, 4, 4), torch.float64)
        }  # fmt: skip
        documents: Any = Documents([16, 7])
        autopar.balanced(DataLoader(documents), model, length=len, shifts=(), **arguments)

    cases: tuple[tuple[dict[str, Any], int], ...] = (({}, 0), ({"packs": False}, 0), ({"encoder": "pixel_values"}, 1))
    for arguments, num_warnings in cases:
        caplog.clear()
        simulate(1, lambda talk, arguments=arguments: load(talk, arguments))
        assert sum("all devices run one plan in every step" in text for text in caplog.messages) == num_warnings
        is_padded = arguments.get("packs") is False  # where the plan expects packed rows
        assert sum("each sequence has a row of its own" in text for text in caplog.messages) == is_padded
