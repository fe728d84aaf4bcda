"""Parameters without dims, of which ranks of other pipeline stages hold nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.5))])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) * self.scales[0])
        return functional.cross_entropy(self.last(h) * self.scales[1], y)


def test_numbers_of_each_stage_are_trained_as_on_one_device() -> None:
    torch.manual_seed(0)
    model, inputs = Scaled().double(), {"x": torch.randn(8, 8).double(), "y": torch.randint(0, 4, (8,))}
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=["pipeline=2", "microbatches=2"])
    report = autopar.verify(model, plan, inputs)  # of shapes, too
    assert report.worst_gradient[1] < 1e-12
    assert report.parameter_error < 1e-12
