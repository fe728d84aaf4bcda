"""Calls inside of ``torch.autocast`` are programs with its casts: as on one device, with stages too."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.plan import Plan
from autopar.planning.building import call_planner
from autopar.trace import Traced, trace
from autopar.verify.rehearsal import run_ranks
from tests.random_plans import random_plan, with_stages

X = torch.randn(8, 16)
BF16 = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Chain(nn.Module):
    """What goes from layer to layer is bfloat16; the loss is computed in float32, as it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return (1 + x.float()).square().mean(), x


@cache
def traced_model() -> tuple[Chain, Traced]:
    torch.manual_seed(0)
    model = Chain()
    return model, trace(model, (X,), {})


def plans() -> list[Plan]:
    program = traced_model()[1].program
    staged = with_stages(random_plan(program, 2, 1, 2), 2, "1f1b", 2, random.Random(0))
    return [random_plan(program, 2, 0), random_plan(program, 2, 1, 2), staged]


def step(model: Any) -> tuple[float, Tensor, float, dict[str, Tensor]]:
    """A loss and an output of training with autocast, a loss without, and the state after."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.autocast("cpu", dtype=BF16):
        loss, output = model(X)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        plain, _ = model(X)
    state = getattr(model, "full_state_dict", model.state_dict)()
    return loss.item(), output.detach() + 0, plain.item(), state


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("number", range(3))
def test_a_call_inside_of_autocast_computes_as_on_one_device(number: int) -> None:
    model, traced = traced_model()
    plan = plans()[number]
    planner = call_planner(model, traced, plan)
    planner((X,), {}, True, "", BF16)
    expected = step(copy.deepcopy(model))
    for found in run_ranks(model, traced, plan, step, planner):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert torch.tensor(found[0]).bfloat16().item() != found[0], "the loss is not rounded to bfloat16"
        assert found[1].dtype == expected[1].dtype == BF16
        torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=2e-3)
        assert found[2] == pytest.approx(expected[2], rel=1e-3)
        for name, value in expected[3].items():
            torch.testing.assert_close(found[3][name], value, rtol=2e-2, atol=2e-3, msg=name)
