"""A forward may name the device that a model trains on: a trace is on the host all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.planning.call_traces import trace_model

WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "arange": lambda _, y: y + torch.arange(8, device="cuda"),
    "tensor": lambda _, y: y + torch.tensor([1.0] * 8, device="cuda:1"),
    "full": lambda net, y: y + torch.full((8,), 2.0, device=net.device),
    "to": lambda _, y: y + torch.arange(8).to("cuda"),
    "number": lambda _, y: y + torch.arange(8).to(0),
    "keyword": lambda net, y: y + torch.ones(8, dtype=torch.float64).to(device=net.device, dtype=y.dtype),
    "cuda": lambda _, y: y + torch.arange(8).cuda(),
    "like": lambda _, y: y + torch.zeros_like(y, device="cuda"),
    "new": lambda _, y: y + y.new_zeros(8, device=torch.device("cuda", 0)),
    "context": lambda net, y: y + net.made_within(),
}


class Named(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way, self.device = nn.Linear(8, 8), way, torch.device("cuda")

    def made_within(self) -> Tensor:
        with self.device:
            return torch.arange(8)

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self, self.layer(x)).square().mean()


@pytest.mark.parametrize("way", WAYS)
def test_a_named_device_is_the_one_that_is_trained_on(way: str) -> None:
    traced = trace_model(Named(way), (torch.randn(4, 8),), device_type="cuda")
    assert not traced.program.notes
    assert {x.device.type for x in traced.constants.values()} <= {"cpu"}
