"""Stages of programs that are not one loss of one batch: outputs that the caller differentiates, dropout, 16 bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.trace import Traced
from autopar.verify import compare
from autopar.verify.rehearsal import run_parallel, run_single
from tests.lower.runs import build
from tests.models import Block, make_plain_gpt
from tests.random_plans import random_pipeline, random_plan, with_stages
from tests.zoo import assert_parity, trained_alone


class TwoHeads(nn.Module):
    """No loss: an output of the first stage, one of the last, an integer one; and a weight that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(3))
        self.head = nn.Linear(16, 8)
        self.unread = nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        """[batch, length] -> early and late outputs."""
        first = self.embed(ids)
        early = torch.tanh(first)
        x = first
        for block in self.blocks:
            x = block(x)
        return {"early": early, "late": self.head(x), "best": x.argmax(-1)}


Loss = Callable[[Mapping[str, Tensor]], Tensor]
LOSSES: dict[str, Loss] = {
    "of all": lambda outputs: outputs["late"].square().mean() + 3 * outputs["early"].sin().mean(),
    "of the last stage": lambda outputs: outputs["late"].exp().sum(),
    "of the first stage": lambda outputs: outputs["early"].square().sum(),
    "that scales": lambda outputs: 1024 * (outputs["late"] * outputs["early"].sum()).mean(),
}


def two_heads() -> tuple[nn.Module, dict[str, Tensor], Traced]:
    torch.manual_seed(0)
    model = TwoHeads().double()
    inputs = {"ids": torch.randint(0, 16, (8, 8), generator=torch.Generator().manual_seed(0))}
    return model, inputs, trace_model(copy.deepcopy(model), inputs)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("world", "groups", "count", "loss"),
    [
        *((2, 2, 2, loss) for loss in LOSSES),
        pytest.param(4, 2, 1, "of the first stage", marks=pytest.mark.slow),
        pytest.param(4, 4, 4, "of all", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_caller_s_loss_gives_the_gradients_of_one_device(world: int, groups: int, count: int, loss: str) -> None:
    model, inputs, traced = two_heads()
    plan = random_pipeline(traced.program, world, 1, groups, "gpipe", count)
    alone = copy.deepcopy(model)
    expected = alone(**inputs)
    LOSSES[loss](expected).backward()

    def rank(communicator: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        parallel = build(model, traced, plan, communicator)
        outputs = parallel(**inputs)
        LOSSES[loss](outputs).backward()
        own = gradients_of(parallel)
        wanted = gradients_of(alone)
        assert own.keys() == wanted.keys() & dict(parallel.named_parameters()).keys()
        return {n: x.detach() for n, x in outputs.items()}, {n: parallel._whole(n, own.get(n)) for n in sorted(wanted)}

    for outputs, gradients in simulate(world, rank):
        torch.testing.assert_close(outputs, {name: x.detach() for name, x in expected.items()})
        torch.testing.assert_close(gradients, gradients_of(alone))


class EarlyLoss(nn.Module):
    """The loss is known after the first block; what follows only gives an output, and half of a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Block(16, 4) for _ in range(4))
        self.blocks[3].mlp = self.blocks[0].mlp

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, length] -> (loss, an output)."""
        x = self.blocks[0](self.embed(ids))
        loss = x.square().mean()
        for block in self.blocks[1:]:
            x = block(x)
        return loss, x


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "count"), [("gpipe", 2), ("zbv", 1)])
def test_what_does_not_influence_the_loss_gets_no_gradient(schedule: str, count: int) -> None:
    torch.manual_seed(0)
    who = trained_alone(EarlyLoss().double(), {"ids": torch.randint(0, 16, (8, 8))})
    assert "blocks.1.qkv.weight" not in who.alone.gradients
    # Gradients that would be zero are priced but not sent.
    assert_parity(who, random_pipeline(who.traced.program, 4, 0, 2, schedule, count), priced=False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])  # in order, split backwards, both directions at once
def test_stages_compute_what_their_strategies_compute_without_them(schedule: str) -> None:
    """To the bit, dropout included: each op draws by its number, its microbatch and its shard, wherever it runs."""
    torch.manual_seed(0)
    model, inputs = make_plain_gpt(layers=4, dropout=0.2)
    traced = trace_model(copy.deepcopy(model), inputs)
    flat = random_plan(traced.program, 2, 5, 4 if schedule == "dualpipev" else 2)
    staged = with_stages(flat, 2, schedule, (2 if schedule == "1f1b" else 4), random.Random(0))
    expected, found = (steps(model, inputs, traced, plan) for plan in (flat, staged))
    assert found == expected
    if schedule == "zbv":
        again = staged.with_decisions(strategies=tuple(replace(s, recompute="full") for s in staged.strategies))
        assert steps(model, inputs, traced, again) == expected


def steps(model: nn.Module, inputs: Mapping[str, Any], traced: Traced, plan: Plan) -> tuple[float, ...]:
    """Losses of two steps, which must be equal on all ranks."""

    def rank(communicator: Communicator) -> tuple[float, ...]:
        parallel = build(model, traced, plan, communicator)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        losses: list[float] = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = parallel(**inputs)[1]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return tuple(losses)

    torch.manual_seed(1)
    runs = simulate(plan.world_size, rank)
    assert len(set(runs)) == 1
    assert len(set(runs[0])) == 2
    return runs[0]


@pytest.mark.slow
def test_stages_in_16_bits() -> None:
    """Compute in bfloat16, gradients added up in float32, as without stages."""
    torch.manual_seed(0)
    model, inputs = make_plain_gpt(layers=4)
    traced = trace_model(copy.deepcopy(model), inputs, dtype=torch.bfloat16)
    flat = random_plan(traced.program, 2, 5, 2)
    staged = with_stages(flat, 2, "zbv", 4, random.Random(0))
    expected, found = (run_parallel(model, traced, plan, inputs, 2) for plan in (flat, staged))
    report = compare(expected, found, staged.world_size)
    assert report.loss_error <= 1e-6
    assert report.worst_gradient[1] <= 1e-5
    assert abs(found.losses[0] - run_single(model, inputs, 1).losses[0]) < 0.05
