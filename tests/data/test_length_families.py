"""Families of plans for sequences of many lengths, on real processes and from a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import autopar
from autopar.errors import InputShapeError, PlanFormatError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan import Plan
from autopar.plan.prediction import LengthPlan, LengthPrediction
from autopar.planning.call_plans import stored_as
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.search import SearchRequest, plan_like, search
from tests.data.test_balanced import Alone, Documents, rows_of_tokens, small_llama
from tests.lower.runs import build
from tests.ranks import run_ranks
from tests.zoo import quick_prices

LENGTHS = [8, 3, 2, 7, 5, 1, 9, 3, 2, 16, 1, 4]  # by batches of three: rows of 8, 8, 16 and 16 tokens
RATE = 0.1


def train(path: str) -> tuple[list[float], list[int]]:
    """The losses of four steps on this rank, and the tokens of the rows of each."""
    mesh = init_device_mesh("cpu", (4,))
    example = rows_of_tokens(2, 16)
    model = autopar.parallelize(small_llama(), mesh, example, inputs="local", plan=path, profile=False)
    loader = DataLoader(Documents(LENGTHS), batch_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[float] = []
    tokens: list[int] = []
    for batch in autopar.balanced(loader, model, length_index=LENGTHS, shifts="labels"):
        optimizer.zero_grad()
        loss: Any = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tokens.append(batch["input_ids"].shape[1])
    return losses, tokens


@pytest.mark.slow
def test_a_plan_with_stages_has_a_family() -> None:
    model, example = small_llama(), rows_of_tokens(4, 16)
    cluster = autopar.Cluster.of("a100", devices_per_node=4)
    lengths = {16: 1, 8: 3, 2: 40}
    plan = autopar.plan(model, cluster, example, constraints="pipeline=2", lengths=lengths)
    assert plan.stages
    assert plan.other_calls
    assert all(decisions.stages == plan.stages for decisions in plan.other_calls)
    assert not plan.groups  # of two devices for each stage none differ
    data = json.loads(plan.to_json())
    other = search(trace_model(model, rows_of_tokens(1, 16)).program, 2, quick_prices(2), SearchRequest())
    data["groups"] = [{"tokens": 16, "decisions": json.loads(other.to_json())["decisions"]}]
    with pytest.raises(PlanFormatError, match=r"0 pipeline stages on 1 .* both must be the same"):
        Plan.from_json(json.dumps(data))

    traced = trace_model(model, example)

    def rank(talk: Communicator) -> str:
        made: Any = build(model, traced, plan, talk)
        made.call_inputs = call_inputs(model, example, traced.program, made.data_split, talk, is_local=True)
        with pytest.raises(InputShapeError) as caught:
            made(**rows_of_tokens(1, 16 if talk.rank else 8))
        return str(caught.value)

    assert all("pad what has other lengths to one that all ranks share" in error for error in simulate(4, rank))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_processes_take_turns_between_plans_and_train_as_one_device(tmp_path: Path) -> None:
    model, prices = small_llama(), quick_prices(4)
    long, short = (trace_model(model, rows_of_tokens(*shape)).program for shape in ((2, 16), (4, 8)))
    plan = search(long, 4, prices, SearchRequest(constraints=("data=2", "tensor=2", "zero=3")))
    request = SearchRequest(constraints=("data=4",), stored=stored_as(long, plan))
    member = plan_like(short, long, plan, prices, request)
    rows = [replace(each.prediction.row, step_s=0.0, microbatch_s=0.0, token_s=1.0) for each in (plan, member)]
    expected = LengthPrediction(plans=tuple(map(LengthPlan, rows)))
    family = replace(
        plan, other_calls=(member.decisions,), prediction=replace(plan.prediction, lengths=expected)
    )  # fmt: skip
    family.save(tmp_path / "plan.json")

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses: list[float] = []
    for start in range(0, len(LENGTHS), 3):
        optimizer.zero_grad()
        documents = Documents(LENGTHS)
        part = [documents[index] for index in range(start, start + 3)]
        loss = Alone(model, part)(torch.zeros(1))  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found, tokens in run_ranks(train, 4, str(tmp_path / "plan.json")):
        assert found == pytest.approx(losses, rel=1e-6)  # rotary positions are float32 in the model's own code
        assert tokens == [8, 8, 16, 16]
