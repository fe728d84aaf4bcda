"""Functions that torch.jit has compiled: their gradients are those of one device, however often they are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.trace.interpreter import check_equals_model


@torch.jit.script
def gated(x: Tensor, bias: Tensor, width: int) -> Tensor:
    """As WaveNets have it."""
    x = x + bias
    return torch.tanh(x[:, :width]) * torch.sigmoid(x[:, width:])


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).square() * 0.5


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 16) for _ in range(4))
        self.bias = nn.Parameter(torch.full((16,), 0.1))
        self.square = torch.jit.script(Squared())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.square(gated(layer(x), self.bias, 8))
        return x.square().mean()


@pytest.mark.parametrize("is_optimized", [False, True])
def test_gradients_pass_through_every_call(is_optimized: bool) -> None:
    """From the second call on torch runs a graph with a backward of its own: a trace silently lost the gradients."""
    torch.manual_seed(0)
    model, x = Gates().double(), torch.randn(4, 8, dtype=torch.float64)
    for _ in range(3 if is_optimized else 0):
        model(x).backward()
    model.zero_grad()
    check_equals_model(model, {"x": x})
