"""How unevenly experts are loaded: what the user says of it, and what prices and memory make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import Cluster, plan
from autopar.errors import ConstraintError
from autopar.explain.question import Question, change
from autopar.ops.experts import EXPERTS
from autopar.plan import Plan
from autopar.planning.imbalance import BALANCED, read_imbalance, with_imbalance
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.step.costs.plan_collectives import plan_collectives
from autopar.step.pricing import predict

pytest.importorskip("transformers.integrations.moe")

from tests.models import make_mixtral
from tests.parity.test_experts import subject
from tests.random_plans import random_plan
from tests.zoo import quick_prices


@pytest.mark.parametrize(
    ("given", "of_two", "of_eight"),
    [
        (None, 1.0, 1.0),
        (1.5, 1.5, 1.5),
        ("3", 2.0, 3.0),  # two devices can't get more than twice the mean
        ([8, 0, 0, 0, 0, 0, 0, 8], 1.0, 4.0),
        ({"first": (2, 2, 2, 2, 0, 0, 0, 0), "second": (1,) * 8}, 1.5, 1.5),
        (torch.tensor([[3, 1, 1, 1, 1, 1, 1, 1]]), 1.2, 2.4),
    ],
)
def test_what_the_busiest_device_gets(given: Any, of_two: float, of_eight: float):
    found = dict(read_imbalance(given).busiest(8))
    assert found.get(2, 1.0) == pytest.approx(of_two)
    assert found.get(8, 1.0) == pytest.approx(of_eight)
    assert set(found) <= {2, 4, 8}, "numbers of devices that divide the experts"


def test_lognormal_loads_are_worse_for_more_devices_and_more_spread():
    found = dict(read_imbalance("lognormal:0.5").busiest(64))
    assert 1.0 < found[2] < found[8] < found[64]
    assert dict(read_imbalance("lognormal:1").busiest(64))[8] > found[8]
    assert dict(read_imbalance("lognormal:1000").busiest(64))[8] == 8.0, "all rows to one expert"


def test_rows_can_come_from_a_file(tmp_path: Path):
    (tmp_path / "rows.json").write_text(json.dumps({"layer": [3, 1]}))
    assert dict(read_imbalance(str(tmp_path / "rows.json")).busiest(2)) == {2: 1.5}


@pytest.mark.parametrize("given", [0.5, "much", "lognormal:x", [], [1.0, -1.0], ["a"], "missing.json", float("nan")])
def test_what_is_no_imbalance_is_refused(given: Any):
    with pytest.raises(ConstraintError, match="imbalance="):
        read_imbalance(given)


def test_rows_of_another_model_are_refused():
    with pytest.raises(ConstraintError, match="2 experts a layer, and this model has 4"):
        with_imbalance(subject("mixtral").traced.program, read_imbalance([1, 2]))


def predicted(program: Program, found: Plan) -> tuple[float, float, float]:
    """Seconds, bytes of activations in layers, and bytes that all-to-alls of kernels send."""
    prediction = predict(program, found.decisions, quick_prices(2), SearchRequest().training, None)
    runs = plan_collectives(program, found, SearchRequest().training)
    sent = sum(run.times * run.num_bytes for run in runs if run.kind == "all_to_all" and run.purpose == "kernel")
    return prediction.step_time_s, sum(cost.saved_bytes + cost.transient_bytes for cost in prediction.costs), sent


def with_factor(program: Program, factor: str) -> Plan:
    for seed in range(64):
        found = random_plan(program, 2, seed)
        if found.num_microbatches > 1:
            continue
        for planned in found.layers:
            ops, assigned = program.kinds[planned.kind].ops, found.strategies[planned.strategy].assignments
            if any(op.target == EXPERTS and factors == (factor,) for op, factors in zip(ops, assigned, strict=True)):
                return found
    raise AssertionError(factor)


@pytest.mark.parametrize("factor", ["tokens", "experts", "dispatch"])
def test_prices_and_memory_are_those_of_the_busiest_device(factor: str):
    program = subject("mixtral").traced.program
    found = with_factor(program, factor)
    even, uneven = (predicted(with_imbalance(program, read_imbalance(each)), found) for each in (None, 1.5))
    if factor == "tokens":  # each device has all experts
        assert uneven == even
        return
    assert uneven[0] > even[0]
    if factor == "experts":  # each device has all rows
        assert uneven[1] == even[1]
        return
    assert uneven[1] > even[1]
    # A token has experts on 5/3 of two devices where any two of four are as likely; at most it is sent to both.
    assert uneven[2] == pytest.approx(2 / (5 / 3) * even[2])


def test_balanced_is_the_program_as_it_was():
    program = subject("mixtral").traced.program
    assert with_imbalance(program, BALANCED).layers == program.layers


def test_the_free_plan_is_no_slower_than_one_that_shares_experts():
    program = with_imbalance(subject("mixtral").traced.program, read_imbalance(2))
    free, shared = (
        search(program, 2, quick_prices(2), SearchRequest(constraints=texts)) for texts in ((), ("expert=2",))
    )
    assert free.step_time_s <= shared.step_time_s * (1 + free.optimality_gap)


@pytest.mark.slow
def test_a_plan_says_what_it_assumes():
    model, inputs = make_mixtral(layers=1, products="grouped_mm")
    found = plan(
        model, Cluster.of("h100", devices_per_node=2), inputs, imbalance=1.5, compile=False,
        constraints=("data=2", "recompute=none", "microbatches=1"),
    )  # fmt: skip
    assert "the busiest device 1.5 times the mean" in " ".join(str(found).split())
    x, target = torch.zeros(4, 8), torch.zeros(4, 1)
    linear = plan(
        torch.nn.Linear(8, 1), Cluster.of("h100"), (x,), loss_fn=torch.nn.functional.mse_loss, example_target=target,
        imbalance=1.5, compile=False,
    )  # fmt: skip
    assert "no experts that run as one op" in str(linear)


def test_a_what_if_changes_it():
    question = Question(Cluster.of("h100"))
    assert change(question, "imbalance=1.5").imbalance == "1.5"
    with pytest.raises(ConstraintError, match="at least 1"):
        change(question, "imbalance=0.2")
