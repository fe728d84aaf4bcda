"""With pipeline stages: weights that a parametrization computes, and calls on other tensors than the parameters."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import weight_norm

from autopar.planning.building import call_planner
from autopar.trace import Traced, trace
from autopar.verify.rehearsal import run_ranks
from tests.random_plans import random_plan, with_stages

X = torch.randn(8, 6, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.blocks[1].norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.blocks(x) - x.flip(1)).square().mean()


@cache
def traced_model() -> tuple[Net, Traced]:
    torch.manual_seed(0)
    model = Net().double()
    return model, trace(model, (X,), {})


def fresh() -> Net:
    made = Net().double()
    made.load_state_dict(traced_model()[0].state_dict())
    return made


def on_stages(action: Any) -> list[Any]:
    model, traced = traced_model()
    plan = with_stages(random_plan(traced.program, 2, 3), 2, "gpipe", 2, random.Random(0))
    return run_ranks(model, traced, plan, action, call_planner(model, traced, plan))


def test_a_penalty_on_weights_that_are_computed() -> None:
    def train(model: Any) -> list[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(X) + 0.1 * sum(block.fc.weight.abs().sum() for block in model.blocks)
            loss.backward()
            found += [loss.item(), float(clip_grad_norm_(model.parameters(), 1.0))]
            optimizer.step()
        with torch.no_grad():
            return [*found, model.blocks[0].fc.weight.norm().item(), model.blocks[3].fc.weight.norm().item()]

    expected = torch.tensor(train(fresh()))
    for found in on_stages(train):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-10, atol=0)


def test_calls_on_other_tensors_than_the_parameters() -> None:
    """As a model-agnostic meta-learner makes them: a step by hand, and the gradient after it."""

    def train(model: Any) -> list[float]:
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
        for _ in range(3):
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
            first = functional_call(model, named, (X,))
            gradients = torch.autograd.grad(first, list(named.values()))
            fast = {name: p - 0.3 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
            second = functional_call(model, fast, (X.flip(0) + 1,))
            optimizer.zero_grad()
            second.backward()
            optimizer.step()
            found += [first.item(), second.item()]
        with torch.no_grad():
            halves = {name: p.detach() / 2 for name, p in model.named_parameters()}
            return [*found, functional_call(model, halves, (X,)).item()]

    expected = torch.tensor(train(fresh()))
    for found in on_stages(train):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-10, atol=0)
