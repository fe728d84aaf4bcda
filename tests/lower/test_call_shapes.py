"""Calls with inputs of other shapes than planned for: planned when they come, on the parameters as they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run import call_executors
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
    traced = autopar.api.trace_model(model, batches[0])
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
