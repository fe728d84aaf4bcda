"""Random legal plans, however silly, train as one device does: any mesh, factor, copy, storage, recomputation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from autopar.search.microbatch import TimeAssignment, time_assignment
from tests.models import ZOO
from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, subject, trained_alone

SETTINGS = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), max_examples=7
)


def check(name: str, world: int, seed: int, num_microbatches: int) -> None:
    """Train by one random plan; without microbatches where they would not be exact."""
    check_subject(subject(name), world, seed, num_microbatches)


def check_subject(who: Subject, world: int, seed: int, num_microbatches: int) -> None:
    program = who.traced.program
    if not isinstance(time_assignment(program, num_microbatches), TimeAssignment):
        num_microbatches = 1
    assert_parity(who, random_plan(program, world, seed, num_microbatches))


@pytest.mark.parametrize(("name", "world"), [("flat", 2), ("unet", 4), ("contrastive", 2)])
def test_a_random_plan(name: str, world: int) -> None:
    check(name, world, seed=1, num_microbatches=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@SETTINGS
@given(world=st.sampled_from((2, 4)), seed=st.integers(0, 10**6), num_microbatches=st.sampled_from((1, 2, 4)))
def test_random_plans(name: str, world: int, seed: int, num_microbatches: int) -> None:
    check(name, world, seed, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "plain_gpt", "flat", "unet"])
def test_random_plans_on_8_devices(name: str) -> None:
    for seed in range(2):
        check(name, 8, seed, 1 + seed)


class Stack(nn.Module):
    """A random stack of small ops on [batch, 8, 16]; some of its weights are used twice."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 8, 16] twice -> a scalar."""
        for index, kind in enumerate(self.kinds):
            x = self.step(kind, self.linears[index % 2], x)
        return functional.mse_loss(x * self.scale, y)

    def step(self, kind: str, linear: nn.Module, x: Tensor) -> Tensor:
        """One op, or a few that belong together."""
        batch = x.shape[0]
        match kind:
            case "linear":
                return torch.tanh(linear(x))
            case "norm":
                return self.norm(x) * self.scale
            case "attention":
                heads = linear(x).view(batch, 8, 4, 4).transpose(1, 2)
                mixed = functional.scaled_dot_product_attention(heads, heads, heads)
                return x + mixed.transpose(1, 2).reshape(batch, 8, 16)
            case "transpose":
                return x + torch.bmm(x, x.transpose(1, 2)).softmax(-1) @ x / 8
            case "split":
                left, right = x.chunk(2, dim=-1)
                return torch.cat([right * torch.sigmoid(left), left], dim=-1)
            case "reduce":
                return x - x.mean(dim=1, keepdim=True) + x.amax(dim=2, keepdim=True) / 8
            case "conv":
                return x + torch.relu(self.conv(x))
            case "broadcast":
                return x * self.linears[0].bias + x[:, :1].expand(batch, 8, 16) * self.scale.view(1, 1, 16)
            case "whole":
                return x / (1 + x.square().mean())
            case _:
                raise ValueError(kind)


KINDS = ("linear", "norm", "attention", "transpose", "split", "reduce", "conv", "broadcast", "whole")


@pytest.mark.slow
@settings(SETTINGS, max_examples=25)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    world=st.sampled_from((2, 4, 4, 8)),
    seed=st.integers(0, 10**6),
    num_microbatches=st.sampled_from((1, 2)),
)
def test_random_models_by_random_plans(kinds: list[str], world: int, seed: int, num_microbatches: int) -> None:
    torch.manual_seed(seed)
    inputs = {"x": torch.randn(8, 8, 16, dtype=torch.float64), "y": torch.randn(8, 8, 16, dtype=torch.float64)}
    who = trained_alone(Stack(kinds).double(), inputs)
    check_subject(who, world, seed, num_microbatches)
