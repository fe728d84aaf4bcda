"""Hooks on gradients and seeds in a forward are errors: an export would leave them out, and compute something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace

ROWS = torch.randn(4, 8)


class Network(nn.Module):
    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.first, self.second = call, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[4, 8] -> a scalar."""
        return self.call(self, x).square().sum()


def layers(net: Any, x: Tensor) -> Tensor:
    return net.second(net.first(x))


def hooks_activations(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return net.second(h)


def hooks_parameters(net: Any, x: Tensor) -> Tensor:
    net.first.weight.register_hook(lambda gradient: 2 * gradient)
    return layers(net, x)


@pytest.mark.parametrize("call", [hooks_activations, hooks_parameters])
def test_hooks_on_gradients_are_refused(call: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=r"test_refused_functions\.py:\d+: .* hook .*has no place to call"):
        trace(Network(call), (ROWS,), {})
    trace(Network(call).eval(), (ROWS,), {}, training=False)  # which has no backward


@pytest.mark.parametrize(
    "register",
    [
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: m.register_forward_hook(lambda *call: call[-1].register_hook(lambda _: None) and None),
    ],
)
def test_hooks_of_modules_on_gradients_are_refused(register: Callable[[nn.Module], Any]) -> None:
    model = Network(layers)
    handle = register(model.second)
    with pytest.raises(TraceError, match="has no place to call"):
        trace(model, (ROWS,), {})
    handle.remove()
    trace(model, (ROWS,), {})


def seeds(net: Any, x: Tensor) -> Tensor:
    untyped: Any = torch
    untyped.manual_seed(0)
    return layers(net, x) * torch.rand(8)


def forks(net: Any, x: Tensor) -> Tensor:
    untyped: Any = torch.random
    with untyped.fork_rng():
        return layers(net, x) * torch.rand(8)


def generates(net: Any, x: Tensor) -> Tensor:
    return layers(net, x) * torch.rand(8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (seeds, "sets the seed or the state"),
        (forks, "sets the seed or the state"),
        (generates, "draws from a torch.Generator of its own"),
    ],
)
def test_seeds_are_refused(call: Callable[[Any, Tensor], Tensor], text: str) -> None:
    with pytest.raises(TraceError, match=rf"test_refused_functions\.py:\d+: .*{text}"):
        trace(Network(call), (ROWS,), {})
    untyped: Any = torch
    untyped.manual_seed(0)  # is torch's own again
