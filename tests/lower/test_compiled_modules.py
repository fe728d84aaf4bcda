"""Models that ``torch.compile`` wraps, whole or in parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.lower.communication.simulated_ranks import simulate
from autopar.objects.compiled_modules import is_compiled
from autopar.planning.building import call_planner
from autopar.trace import put_loss_inside, trace
from tests.lower.runs import build
from tests.random_plans import random_plan

X = torch.randn(4, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.note = "a part"

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()

    def describe(self) -> str:
        return "described"


def wrapped(module: nn.Module) -> nn.Module:
    made = torch.compile(module, backend="eager")
    assert isinstance(made, nn.Module)
    return made


@pytest.fixture
def with_compiled_part() -> Model:
    model = Model()
    model.second = wrapped(model.second)
    return model


def test_a_compiled_part_keeps_names_and_attributes(with_compiled_part: Model) -> None:
    traced = trace(with_compiled_part, (X,), {}, training=True)
    plan = random_plan(traced.program, 2, 0)
    planner = call_planner(with_compiled_part, traced, plan)

    def on_rank(communicator: object) -> None:
        made = build(with_compiled_part, traced, plan, communicator, planner=planner)  # pyright: ignore[reportArgumentType]
        assert [*dict(made.named_parameters())] == [*dict(with_compiled_part.named_parameters())]
        assert made.second.note == "a part"
        assert made.second.in_features == 8
        with pytest.raises(AttributeError, match="no_such"):
            _ = made.second.no_such
        copy.deepcopy(made)(X).backward()

    simulate(2, on_rank)


def test_a_compiled_model_is_the_one_inside() -> None:
    model = Model()
    inside, _ = put_loss_inside(wrapped(model), (X,), None, None)
    assert inside is model


@pytest.mark.slow
def test_both_train_as_one_device(with_compiled_part: Model) -> None:
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    for model in (wrapped(Model()), with_compiled_part):
        plan = autopar.plan(model, cluster, (X,), constraints=["tensor=2"])
        autopar.verify(model, plan, (X,), steps=2)
    assert is_compiled(with_compiled_part.second)
