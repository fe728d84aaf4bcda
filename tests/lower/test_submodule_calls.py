"""Submodules of a parallel module that are called alone, to encode or to sample, run as on one device."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ConstraintError, SubmoduleError
from autopar.lower import Executable
from autopar.plan import Plan
from autopar.planning.building import call_planner
from autopar.planning.call_plans import CallPlanner
from autopar.trace import Traced, trace
from autopar.verify.rehearsal import run_ranks
from tests.lower.test_original_class import on_ranks
from tests.random_plans import random_plan, with_stages

X = torch.randn(8, 6, dtype=torch.float64)
Z = torch.randn(3, 4, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 4), *(Block() for _ in range(3)))
        self.decoder = nn.Sequential(
            *(Block() for _ in range(3)), nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 6)
        )
        self.squash = lambda x: self.decoder(torch.tanh(x))

    def sample(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.squash(z))

    def forward(self, x: Tensor) -> Tensor:
        return (self.squash(self.encoder(x)) - x).square().mean()


@cache
def traced_model() -> tuple[AutoEncoder, Traced]:
    torch.manual_seed(0)
    model = AutoEncoder().double()
    return model, trace(model, (X,), {})


def fresh(state: dict[str, Tensor]) -> AutoEncoder:
    """A model on one device; a deep copy of one would have the function `squash` of the other."""
    made = AutoEncoder().double()
    made.load_state_dict(state)
    return made


class NoPlan:
    """A planner for a submodule that lies in one stage."""

    reads = frozenset[tuple[str, str]]()

    def __call__(self, *_: Any) -> Executable:
        raise ConstraintError("a stage would have none")


def on_planned_ranks(plan: Plan, action: Any) -> list[Any]:
    model, traced = traced_model()
    return run_ranks(model, traced, plan, action, planner_for(plan))


@cache
def planner_for(plan: Plan) -> CallPlanner:
    model, traced = traced_model()
    planner = call_planner(model, traced, plan)
    if not plan.stages:
        for mode in (True, False):
            planner((Z,), {}, mode, "decoder")
            planner((X,), {}, mode, "encoder")
        planner((X,), {}, False)
    return planner


@cache
def plan_by_seed(seed: int) -> Plan:
    return random_plan(traced_model()[1].program, 4, seed)


SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]


def pipeline() -> Plan:
    return with_stages(random_plan(traced_model()[1].program, 2, 3), 2, "gpipe", 2, random.Random(0))


@torch.no_grad()
def samples(model: Any) -> Tensor:
    model.eval()
    found = torch.cat([model.sample(Z), model.encoder(input=X).repeat(1, 2)[:, :6]])
    model.train()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*SEEDS, None], ids=lambda seed: "stages" if seed is None else seed)
def test_sampling_goes_on_with_the_training(seed: int | None) -> None:
    def train(model: Any) -> tuple[list[float], Tensor, Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, before = [], fresh(model.state_dict()) if type(model) is AutoEncoder else copy.deepcopy(model)
        for _ in range(2):
            loss = model(X)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss.item(), samples(model).sum().item()]
        return losses, samples(model), samples(before)

    expected = train(fresh(traced_model()[0].state_dict()))
    assert (expected[1] - expected[2]).abs().max() > 1e-3
    for losses, after, before in on_planned_ranks(pipeline() if seed is None else plan_by_seed(seed), train):
        assert losses == pytest.approx(expected[0], rel=1e-10)
        torch.testing.assert_close(after, expected[1], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(before, expected[2], rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_submodules_that_the_loop_calls(seed: int) -> None:
    def step(model: Any) -> dict[str, Tensor]:
        loss = model.decoder(Z).square().mean() + model.encoder(X).square().mean() + model(X)
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return getattr(model, "full_state_dict", model.state_dict)()

    expected = step(fresh(traced_model()[0].state_dict()))
    for found in on_planned_ranks(plan_by_seed(seed), step):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_with_stages_gradients_are_refused() -> None:
    def call(model: Any) -> None:
        with pytest.raises(SubmoduleError, match=r"'decoder' alone can't be cut into .* stages.*no_grad"):
            model.decoder(Z)

    model, traced = traced_model()
    run_ranks(model, traced, pipeline(), call, NoPlan())


def test_without_a_planner_they_are_refused() -> None:
    def check(parallel: Any) -> None:
        with pytest.raises(SubmoduleError, match=r"'transformer.h.1' is part of .* without a planner"):
            parallel.transformer["h"][1](torch.ones(2, 16))

    on_ranks(check)


def test_functions_of_the_constructor_are_traced_with_its_parameters() -> None:
    """As ``m = self.mlp; self.mlpf = lambda x: m.c_proj(m.c_fc(x))`` in minGPT, which copying leaves as they are."""
    model, traced = traced_model()
    read = {traced.program.parameters.get(name) for layer in traced.program.layers for name in layer.state}
    assert {name for name, _ in model.named_parameters()} <= read
