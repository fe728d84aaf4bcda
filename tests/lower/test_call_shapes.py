"""Calls with inputs of other shapes than planned for: planned when they come, on the parameters as they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ExampleInputsError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run import call_executors
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from autopar.verify.rehearsal import planner_for
from tests.lower.runs import build
from tests.shapes import assert_exact, of_length, of_rows, random_batches, train_in_turns
from tests.zoo import plan_for, quick_search, subject

TEXTS = ("llama", "gpt2", "t5", "deep_gpt2", "deep_llama")


def train_on(name: str, world: int, constraints: tuple[str, ...], others: list[dict[str, object]]) -> None:
    who = subject(name)
    plan = plan_for(name, world, constraints, stages=any(text.startswith("pipeline") for text in constraints))
    assert_exact(train_in_turns(who, plan, others))


@pytest.mark.parametrize(
    ("name", "world", "text"),
    [
        ("plain_gpt", 2, "data=2 zero=3"),
        pytest.param("plain_gpt", 2, "data=2 microbatches=2 zero=2 recompute=full", marks=pytest.mark.slow),
        pytest.param("llama", 4, "data=2 tensor=2 zero=1", marks=pytest.mark.slow),
        pytest.param("unet", 2, "data=2 zero=3", marks=pytest.mark.slow),
        pytest.param("t5", 2, "tensor=2", marks=pytest.mark.slow),
        pytest.param("deep_llama", 4, "pipeline=2 schedule=zbv microbatches=4 data=2 zero=2", marks=pytest.mark.slow),
        pytest.param("deep_batch_normed", 2, "data=2", marks=pytest.mark.slow),
    ],
)
def test_other_shapes_train_as_one_device_does(name: str, world: int, text: str) -> None:
    inputs = subject(name).inputs
    others = [of_rows(inputs, 4), of_rows(inputs, 7)]
    if name in TEXTS:
        others.append(of_length(inputs, 6))
    train_on(name, world, tuple(text.split()), others)


def test_more_forms_than_are_kept_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(call_executors, "MOST_FORMS", 2)
    model, batches = nn.Linear(4, 4), [{"input": torch.zeros(rows, 4)} for rows in (2, 3, 4, 5)]
    traced = trace_model(model, batches[0])
    plan = quick_search(traced.program, 1, SearchRequest())
    planner = planner_for(model, traced, plan, batches[1:], training=True)

    def rank(talk: Communicator) -> int:
        made = build(model, traced, plan, talk, planner=planner)
        for batch in batches:
            made(**batch)
        return len(made.plans)

    assert simulate(1, rank) == [2]
    assert sum("of more than 2 forms, each of which is planned" in text for text in caplog.messages) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "constraints"), [("gpt2", ("tensor=2",)), ("flat", ("data=2", "microbatches=2"))])
def test_random_shapes_train_as_one_device_does(name: str, constraints: tuple[str, ...]) -> None:
    train_on(name, 2, constraints, random_batches(subject(name).inputs, 1, 3, has_lengths=name in TEXTS))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("text", ["data=2", "tensor=2", "data=2 zero=3"])
def test_batches_without_rows_are_as_on_one_device_and_later_ones_are_planned(text: str) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    batches = [{"src": torch.randn(rows, 3, 4)} for rows in (4, 0, 3, 1)]
    expected = [model(**batch) for batch in batches]
    traced = trace_model(model, batches[0])
    plan = quick_search(traced.program, 2, SearchRequest(constraints=tuple(text.split())))
    planner = planner_for(model, traced, plan, batches, training=True)

    def rank(talk: Communicator) -> list[Tensor]:
        made = build(model, traced, plan, talk, planner=planner)
        made.whole_outputs = True
        outputs = [made(**batch) for batch in batches]
        outputs[1].sum().backward()
        return outputs

    for outputs in simulate(2, rank):
        for found, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(found, wanted)


def test_an_example_without_rows_is_refused() -> None:
    with pytest.raises(ExampleInputsError, match="a batch of 0 rows"):
        trace_model(nn.Linear(4, 4), (torch.zeros(0, 4),))
