"""Submodules with a hash of their own, as metrics of torchmetrics have."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.building import call_planner
from autopar.trace import trace
from tests.lower.runs import build
from tests.random_plans import random_plan

X = torch.arange(32, dtype=torch.float64).view(4, 8) / 16


class Metric(nn.Module):
    """Counts in tensors that are attributes, by which it is hashed."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.total = ["total"], torch.tensor(0.0)
        self.update = self.counting(self.update)

    def counting(self, update: object) -> object:
        def counted(x: Tensor) -> None:
            self.total = self.total + x
            update(x)  # pyright: ignore

        return counted

    def update(self, x: Tensor) -> None:
        """Nothing more."""

    def __hash__(self) -> int:
        return hash((type(self), *(id(getattr(self, name)) for name in self.names)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.metric = nn.Linear(8, 8), Metric()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).square().mean()


def test_they_count_between_calls() -> None:
    torch.manual_seed(0)
    model = Model().double()
    traced = trace(model, (X,), {}, training=True)
    assert not any(path == "metric" and name == "total" for path, name in traced.reads)
    plan = random_plan(traced.program, 2, 0)
    planner = call_planner(model, traced, plan)

    def on_rank(communicator: Communicator) -> None:
        made = build(model, traced, plan, communicator, planner=planner)
        for each in (made, copy.deepcopy(made)):
            for _ in range(2):
                each(X).backward()
                each.metric.update(torch.tensor(1.0))
        assert float(made.metric.total) == 2.0

    simulate(2, on_rank)
    assert float(model.metric.total) == 0.0
