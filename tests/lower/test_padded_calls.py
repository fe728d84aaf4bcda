"""Batches that the devices don't divide run with rows that count for nothing, and give what one device gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.lower import ParallelModule
from autopar.planning.caller_inputs import call_inputs
from autopar.trace import Traced, trace
from autopar.verify.rehearsal import keep_double_program, planner_for, run_ranks
from tests.shapes import assert_exact, of_rows, train_in_turns
from tests.zoo import Subject, forced_plan, plan_for, subject


def padded(who: Subject, plan: Any, rows: int, *, training: bool = True) -> bool:
    """Whether batches of so many rows run with more."""
    planner = planner_for(who.model, who.traced, plan, [], keep_double_program)
    planner((), who.inputs, training)
    made = planner((), of_rows(who.inputs, rows), training)
    assert any("count for nothing" in note for note in made.plan.notes) == bool(made.form)
    return bool(made.form)


@pytest.mark.parametrize(
    ("name", "world", "text"),
    [
        # `test_call_shapes` trains it with 7 rows, too.
        pytest.param("plain_gpt", 2, "data=2 zero=3", marks=pytest.mark.slow),
        pytest.param("deep_gpt2", 4, "pipeline=2 microbatches=2 data=2", marks=pytest.mark.slow),
        pytest.param("bert", 2, "data=2 microbatches=2 recompute=full", marks=pytest.mark.slow),
        pytest.param("short_t5", 2, "data=2 zero=2", marks=pytest.mark.slow),
        pytest.param("short_bart", 2, "data=2", marks=pytest.mark.slow),
        pytest.param("classifying_bert", 2, "data=2", marks=pytest.mark.slow),
    ],
)
def test_the_last_batch_trains_as_on_one_device(name: str, world: int, text: str) -> None:
    who = subject(name)
    plan = plan_for(name, world, tuple(text.split()), stages="pipeline" in text)
    assert padded(who, plan, 7)
    assert_exact(train_in_turns(who, plan, [of_rows(who.inputs, 7), of_rows(who.inputs, 5)]))


@pytest.mark.parametrize("name", ["flat", pytest.param("contrastive", marks=pytest.mark.slow)])
def test_rows_that_count_are_not_added(name: str) -> None:
    """A mean over rows; similarities of all pairs of rows."""
    who = subject(name)
    plan = plan_for(name, 2, ("data=2",))
    assert not padded(who, plan, 7)


def test_rows_are_not_added_to_batch_norm_but_in_eval() -> None:
    who = subject("unet")
    assert not padded(who, plan_for("unet", 2, ("data=2",)), 7)


def test_few_rows_are_not_doubled() -> None:
    who = subject("plain_gpt")
    assert not padded(who, plan_for("plain_gpt", 2, ("data=2",)), 1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        logits = self.layers(x)
        return (logits,) if y is None else (functional.cross_entropy(logits, y), logits)


def classifier() -> tuple[nn.Module, dict[str, torch.Tensor], Traced, Any]:
    model = Classifier()
    batch = {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randint(5, (8,))}
    traced = trace(model, (), batch, training=True)
    return model, batch, traced, forced_plan(traced.program, 2, "data=2", "zero=0")


@pytest.mark.parametrize("has_labels", [True, False])
def test_evaluation_gives_the_rows_that_came(has_labels: bool) -> None:
    model, batch, traced, plan = classifier()
    batch = batch if has_labels else {"x": batch["x"]}
    last = of_rows(batch, 7)
    planner = planner_for(model, traced, plan, [batch, last])
    expected = copy.deepcopy(model).eval()(**last)

    def rank(parallel: ParallelModule) -> Any:
        parallel.eval()
        parallel(**batch)
        made = parallel(**last)
        assert "[7, 6]" in parallel.plans[-2].inputs or "[7, 6]" in parallel.plans[-1].inputs
        return [x.detach().clone() for x in made]

    for found in run_ranks(model, traced, plan, rank, planner):
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", ["whole", "local rows", "local outputs"])
def test_outputs_in_training_have_the_rows_that_came_and_gradients(how: str) -> None:
    """A loss of the caller's own, of what the model gives beside its loss."""
    model, batch, traced, plan = classifier()
    last = of_rows(batch, 7)
    planner = planner_for(model, traced, plan, [last], training=True)
    alone = copy.deepcopy(model)
    loss, logits = alone(**last)
    (loss + logits.square().mean()).backward()

    def rank(parallel: ParallelModule) -> Any:
        given, parts = last, slice(None)
        if how == "local rows":
            talk = parallel._communicator
            parallel.call_inputs = call_inputs(model, batch, traced.program, parallel.data_split, talk, is_local=True)
            parts = slice(0, 4) if parallel.data_rank == 0 else slice(4, 7)
            given = {name: x[parts] for name, x in last.items()}
        parallel.whole_outputs = False if how == "local outputs" else None
        loss, logits = parallel(**given)
        assert logits.shape == (7, 5) or how == "local rows"
        if how == "local rows":
            loss.backward()
            return logits.detach().clone(), parts, None
        (loss + logits.square().mean()).backward()
        return logits.detach().clone(), parts, {n: p.grad.to_local() for n, p in parallel.named_parameters()}

    for found, parts, gradients in run_ranks(model, traced, plan, rank, planner):
        torch.testing.assert_close(found, logits[parts].detach(), rtol=1e-12, atol=1e-12)
        for name, p in alone.named_parameters():
            if gradients is not None:
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-12)
