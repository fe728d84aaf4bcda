"""Random legal plans, however silly, train as one device does: any mesh, factor, copy, storage, recomputation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from tests.models import ZOO
from tests.random_plans import pipelines_of, random_pipeline, random_plan
from tests.zoo import Subject, assert_parity, subject, trained_alone

SETTINGS = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck), max_examples=3
)

# Models of several layers, each with a difficulty of its own.
DEEP = ("llama", "gpt2", "t5", "plain_gpt", "flat", "skip_unet", "frozen", "crossing", "deep_half_frozen",
        "deep_batch_normed")  # fmt: skip


def check(name: str, world: int, seed: int, num_microbatches: int) -> None:
    """Train by one random plan; without microbatches where they would not be exact."""
    check_subject(subject(name), world, seed, num_microbatches)


def check_subject(who: Subject, world: int, seed: int, num_microbatches: int) -> None:
    program = who.traced.program
    if not isinstance(time_assignment(program, num_microbatches), TimeAssignment):
        num_microbatches = 1
    plan = random_plan(program, world, seed, num_microbatches)
    assert_parity(who, plan, priced=num_microbatches == 1)


def check_pipeline(who: Subject, data: st.DataObject) -> None:
    """Train by one random pipeline: any groups, schedule, cuts and strategies that the program's layers allow."""
    program = who.traced.program
    counts = [n for n in (1, 2, 4) if isinstance(time_assignment(program, n), TimeAssignment)]
    choices = [
        (world, groups, schedule, count)
        for world in (2, 4, 8)
        for groups in (2, 4)
        for count in counts
        for schedule in pipelines_of(program, groups, count)
        if groups <= world
    ]
    assume(choices)
    world, groups, schedule, count = data.draw(st.sampled_from(choices))
    plan = random_pipeline(program, world, data.draw(st.integers(0, 10**6)), groups, schedule, count)
    assert_parity(who, plan, priced=count == 1)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "world"), [("flat", 2), ("unet", 4), ("contrastive", 2)])
def test_a_random_plan(name: str, world: int) -> None:
    check(name, world, seed=1, num_microbatches=1)


@pytest.mark.parametrize(("name", "groups", "schedule"), [("flat", 2, "zbv"), ("crossing", 4, "gpipe")])
def test_a_random_pipeline(name: str, groups: int, schedule: str) -> None:
    who = subject(name)
    assert_parity(who, random_pipeline(who.traced.program, 4, 1, groups, schedule, 2), priced=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@SETTINGS
@given(world=st.sampled_from((2, 4)), seed=st.integers(0, 10**6), num_microbatches=st.sampled_from((1, 2, 4)))
def test_random_plans(name: str, world: int, seed: int, num_microbatches: int) -> None:
    check(name, world, seed, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [("llama", 1), ("unet", 1), ("crossing", 2)],
)
def test_random_plans_on_8_devices(name: str, num_microbatches: int) -> None:
    check(name, 8, num_microbatches - 1, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
@settings(SETTINGS, max_examples=2)
@given(data=st.data())
def test_random_pipelines(name: str, data: st.DataObject) -> None:
    check_pipeline(subject(name), data)


class Steps(nn.Module):
    """Small ops on [batch, 8, 16]; some of its weights are used twice."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.scale = nn.Parameter(torch.ones(16))
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8, 16] -> the same."""
        for index, kind in enumerate(self.kinds):
            x = self.step(kind, self.linears[index % 2], x)
        return x * self.scale

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


class Stack(nn.Module):
    """A random stack of small ops."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.steps = Steps(kinds)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 8, 16] twice -> a scalar."""
        return functional.mse_loss(self.steps(x), y)


class Tower(nn.Module):
    """A random op per layer; values that skip layers, weights that layers share."""

    def __init__(self, kinds: list[str], skips: list[tuple[int, int]], ties: list[tuple[int, int]]) -> None:
        super().__init__()
        self.floors = nn.ModuleList(Steps([kind, kind]) for kind in kinds)
        self.skips = skips
        for first, second in ties:
            self.floors[second].linears = self.floors[first].linears

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 8, 16] twice -> a scalar."""
        below: list[Tensor] = []
        for index, floor in enumerate(self.floors):
            below.append(x)
            for source in (low for low, high in self.skips if high == index and low < index):
                x = x + below[source] / 2
            x = floor(x)
        return functional.mse_loss(x, y)


KINDS = ("linear", "norm", "attention", "transpose", "split", "reduce", "conv", "broadcast", "whole")


@pytest.mark.slow
@settings(SETTINGS, max_examples=8)
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


@pytest.mark.slow
@settings(SETTINGS, max_examples=6)
@given(data=st.data())
def test_random_models_by_random_pipelines(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=4, max_size=9))
    pairs = st.lists(st.tuples(st.integers(0, len(kinds) - 1), st.integers(0, len(kinds) - 1)), max_size=2)
    model = Tower(kinds, data.draw(pairs), data.draw(pairs)).double()
    inputs = {"x": torch.randn(8, 8, 16, dtype=torch.float64), "y": torch.randn(8, 8, 16, dtype=torch.float64)}
    check_pipeline(trained_alone(model, inputs), data)
