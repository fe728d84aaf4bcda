"""Head and loss piece by piece train as one device does, however the rest is split, and run what was priced."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.cluster import Cluster
from autopar.errors import ConstraintError, InfeasibleError, OutputError, PlanMismatchError
from autopar.lower import ParallelModule
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.ops.linear_cross_entropy import TARGET
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest, search
from autopar.step.plan_check import check_fit
from autopar.step.variants.logits import PIECE_TOKENS
from autopar.verify.rehearsal import run_ranks
from tests.zoo import Subject, assert_parity, quick, quick_prices, subject

TOKENS = 5
"""No length of a batch, a sequence or a part of them is a multiple of it."""

FORCED = (
    (2, ("data=2", "zero=3", "microbatches=2")),
    (2, ("tensor=2", "recompute=full")),
    (2, ("sequence=2",)),
    (2, ("pipeline=2", "microbatches=4", "schedule=1f1b")),
    (4, ("data=2", "tensor=2", "zero=2", "microbatches=2")),
    (4, ("tensor=4", "recompute=selective", "offload=activations")),
    (4, ("pipeline=2", "data=2", "microbatches=4", "schedule=interleaved_zero_bubble", "stages=4")),
)


@cache
def pieces_of(name: str) -> Subject:
    whole = subject(name)
    return replace(whole, traced=whole.traced.in_pieces(TOKENS))


@cache
def plan_in_pieces(name: str, world: int, constraints: tuple[str, ...]) -> Plan:
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions)
    return search(pieces_of(name).traced.program, world, quick_prices(world), request)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "world", "constraints"),
    [
        *(("llama", *forced) for forced in FORCED[:4]),
        *(pytest.param("llama", *forced, marks=pytest.mark.slow) for forced in FORCED[4:]),
        *(pytest.param("gpt2", *forced, marks=pytest.mark.slow) for forced in (FORCED[1], FORCED[3])),  # a tied head
    ],
)
def test_training_is_that_of_one_device(name: str, world: int, constraints: tuple[str, ...]) -> None:
    who, plan = pieces_of(name), plan_in_pieces(name, world, constraints)
    assert plan.piece_tokens == TOKENS
    assert any(op.target == TARGET for layer in who.traced.program.layers for op in layer.ops)
    assert_parity(who, plan)


def test_a_vocabulary_is_cut() -> None:
    """The forced plans above split it, so that their parity says something of the kernel that does."""
    plan = plan_in_pieces("llama", 2, ("tensor=2", "recompute=full"))
    layer = pieces_of("llama").traced.program.layers[-1]
    place = next(index for index, op in enumerate(layer.ops) if op.target == TARGET)
    assert plan.decisions.layer_strategies[-1].assignments[place] == ("v",)


# --- what the caller reads of logits that were never whole


def test_logits_are_those_of_one_device_until_parameters_change() -> None:
    """They come when they are read, whole on every rank; without gradients where no planner can plan for them."""
    who, plan = pieces_of("llama"), plan_in_pieces("llama", 2, ("pipeline=2", "microbatches=4", "schedule=1f1b"))
    with torch.no_grad():
        expected = who.model.train()(**who.inputs).logits

    def rank(model: ParallelModule) -> None:
        out = model.train()(**who.inputs)
        assert out.logits.shape == expected.shape
        assert out.logits.requires_grad
        torch.testing.assert_close(out.logits.detach(), expected, rtol=1e-6, atol=1e-6)  # the model rounds to float32
        with pytest.raises(OutputError, match="of which this plan has no gradients"):
            out.logits.square().sum().backward()
        late = model(**who.inputs)
        late.loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(OutputError, match="parameters have changed since the call"):
            late.logits.sum()

    run_ranks(who.model, who.traced, plan, rank)


# --- what is asked for, and what a search chooses


class Head(nn.Module):
    """A head of many classes over few features: next to its logits all else is small."""

    def __init__(self, classes: int = 4096) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1), label_smoothing=0.1), logits


CLUSTER = Cluster.of("h100", devices_per_node=2)
BATCH = (torch.ones(2, 8192, 8), torch.zeros(2, 8192, dtype=torch.int64))


def test_pieces_are_taken_where_whole_logits_do_not_fit() -> None:
    forced = ("data=2", "microbatches=1")
    whole = autopar.plan(Head(), CLUSTER, BATCH, constraints=forced)
    assert whole.piece_tokens == 0
    asked = autopar.plan(Head(), CLUSTER, BATCH, constraints=("logits=512", *forced))
    assert asked.piece_tokens == 512
    assert asked.peak_memory_bytes < 0.5 * whole.peak_memory_bytes
    memory = 0.7 * whole.peak_memory_bytes
    found = autopar.plan(Head(), CLUSTER, BATCH, constraints=forced, memory=memory)
    assert found.piece_tokens == PIECE_TOKENS
    assert any("logits in pieces of 2048 tokens" in note for note in found.notes)
    with pytest.raises(InfeasibleError):
        autopar.plan(Head(), CLUSTER, BATCH, constraints=("logits=whole", *forced), memory=memory)


def test_a_plan_keeps_its_pieces_and_fits_no_other_program() -> None:
    plan = autopar.plan(Head(64), CLUSTER, BATCH, constraints=("logits=512", "data=2"))
    assert Plan.from_json(plan.to_json()).piece_tokens == 512
    traced = trace_model(Head(64), BATCH)
    check_fit(plan, traced.in_pieces(512).program, 2)
    with pytest.raises(PlanMismatchError, match="logits of 512 tokens at a time"):
        check_fit(plan, traced.program, 2)


def test_a_plan_in_pieces_is_verified() -> None:
    inputs = (torch.randn(4, 6, 8), torch.randint(0, 64, (4, 6)))
    plan = autopar.plan(Head(64), CLUSTER, inputs, constraints=("logits=5", "tensor=2"))
    assert autopar.verify(Head(64), plan, inputs).loss_error < 1e-12


@pytest.mark.parametrize(
    ("text", "message"),
    [("logits=0", "must be at least 1"), ("logits=half", "is not whole, pieces or a whole number")],
)
def test_what_is_no_way_to_make_logits_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        autopar.plan(Head(64), CLUSTER, BATCH, constraints=text)


def test_a_model_without_logits_is_refused() -> None:
    with pytest.raises(ConstraintError, match="this model has no linear layer whose result goes to a cross entropy"):
        autopar.plan(nn.Linear(8, 8), CLUSTER, (torch.ones(4, 8),), constraints="logits=pieces")
