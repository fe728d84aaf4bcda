"""Parameters that are single numbers, in pipeline stages: every rank has them as numbers."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm

import autopar
from tests.end_to_end.harness import launch, whole_mesh


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.linear(x).tanh()


def train(model: Any, x: Tensor) -> list[Any]:
    """What a script reads of such parameters, and of gradients that they are part of."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    read: list[Any] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        read += [loss.item(), get_total_norm([p.grad for p in model.parameters()]).item()]
        read.append(clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        with torch.no_grad():
            for block in model:
                block.gate.clamp_(max=0.55).mul_(1.01)
        read += [block.gate.item() for block in model]
        read += [block.gate.exp().sum().item() + float(block.gate.grad.abs()) for block in model]
    return read


def check_numbers() -> None:
    torch.manual_seed(0)
    single, x = nn.Sequential(*(Gated() for _ in range(4))).double(), torch.randn(8, 8, dtype=torch.float64)
    model: Any = autopar.parallelize(
        copy.deepcopy(single), whole_mesh(), (x,), profile=False, constraints=("pipeline=2",)
    )
    assert [p.shape for p in model.parameters()] == [p.shape for p in single.parameters()]
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in single.parameters())
    for found, expected in zip(train(model, x), train(single, x), strict=True):
        assert math.isclose(found, expected, rel_tol=1e-9)
    whole = model.full_state_dict()
    for name, p in single.named_parameters():
        torch.testing.assert_close(whole[name], p.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), p, rtol=1e-9, atol=1e-12)
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        for block in model:
            block.gate.fill_(2.0)
    model.load_state_dict(kept)
    for name, value in model.full_state_dict().items():
        assert torch.equal(value, whole[name])


@pytest.mark.slow
def test_two_stages_have_all_numbers() -> None:
    launch(2, check_numbers)


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
