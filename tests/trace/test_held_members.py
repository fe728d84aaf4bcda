"""Parameters that modules hold a second time, in lists, dicts and functions."""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.trace import trace
from autopar.trace.calls.structure import holds_tensors
from autopar.trace.python_values import function_caches


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        up, down, bias = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.ones(4))
        slope = nn.Parameter(torch.full((4,), 0.5))
        self.up, self.down, self.bias, self.slope = up, down, bias, slope
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]), requires_grad=False)
        self.weights, self.others = [up, down], {"scale": (self.scale,)}
        self.shift, self.squash = lambda x: x + bias, lambda x, slope=slope: torch.tanh(x * slope)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return (self.squash(self.shift(x)) * self.others["scale"][0]).square().mean()


def test_they_are_those_of_the_modules() -> None:
    model, inputs = Network(), {"x": torch.randn(8, 4)}
    weights = model.weights
    traced = trace(model, (), inputs)
    assert sorted(traced.program.parameters.values()) == ["bias", "down", "scale", "slope", "up"]
    assert not traced.constants
    assert model.weights is weights
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=["data=2"])
    autopar.verify(model, plan, inputs, steps=2)


def test_those_of_other_objects_are_refused() -> None:
    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.box = SimpleNamespace(weight=self.weight)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.box.weight).sum()

    with pytest.raises(TraceError, match=r"test_held_members.py:\d+: a parameter .* is read from an object"):
        trace(Boxed(), (torch.ones(8, 4),), {})


@lru_cache(maxsize=8)
def positions(length: int) -> tuple[Tensor]:
    return (torch.arange(length).float() / length,)


@cache
def scale(length: int) -> Tensor:
    return torch.full((length,), 2.0)


class Positioned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-1]
        return ((x + positions(length)[0]) * scale(length) + positions(length)[0]).square().mean()


def test_functions_that_keep_tensors_keep_none_of_a_trace() -> None:
    x = torch.randn(8, 4)
    positions.cache_clear(), scale.cache_clear()
    program = trace(Positioned(), (x,), {}).program
    assert type(scale(4)) is type(positions(4)[0]) is Tensor
    shift = torch.arange(4) / 4
    assert torch.equal(Positioned()(x), ((x + shift) * 2 + shift).square().mean())
    assert trace(Positioned(), (x,), {}).program.parameters == program.parameters


def test_caches_of_the_tracer_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of symbolic shapes keep whole traces: minutes, where a forward decides by what it read."""
    looked: list[str] = []

    def kept(function: Any) -> list[Any]:
        looked.append(function.__module__)
        return []

    monkeypatch.setattr(function_caches, "_kept", kept)

    class Shortened(nn.Module):
        def forward(self, x: Tensor, length: Tensor) -> Tensor:
            longest = int(length.max())
            return (x[:, :longest] + positions(longest)[0]).square().mean() * (2 if longest > 2 else 1)

    trace(Shortened(), (torch.randn(8, 4), torch.tensor([3, 1])), {})
    assert __name__ in looked
    assert not [name for name in looked if name.startswith(("torch", "sympy"))]


def test_a_python_module_that_a_cache_keeps_is_no_tensor() -> None:
    assert not holds_tensors([SimpleNamespace(backend=sys.modules[__name__])])
    assert holds_tensors([SimpleNamespace(backend={"weight": torch.ones(1)})])


def test_tables_that_a_call_left_elsewhere_are_refused() -> None:
    tables: dict[int, Tensor] = {}

    class Tabled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[-1] not in tables:
                tables[x.shape[-1]] = torch.arange(x.shape[-1])
            return (x * tables[x.shape[-1]]).sum()

    trace(Tabled(), (torch.ones(8, 4),), {})
    with pytest.raises(TraceError, match="or a table that a call has left, is read from an object"):
        trace(Tabled(), (torch.ones(8, 4),), {})
