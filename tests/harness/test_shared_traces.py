"""Ranks share a trace only if it would be the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar.planning.call_traces
from autopar.planning.call_traces import trace_model
from tests import shared_traces
from tests.shared_traces import share_traces


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.shift = torch.ones(8)  # no parameter and no buffer: a constant of the trace
        self.power = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(x)) + self.shift).pow(self.power).mean()


def tie(net: Net) -> None:
    net.second.weight = net.first.weight


def copy_value(net: Net) -> None:
    net.second.weight.data = net.first.weight.data.clone()


CHANGES: dict[str, Callable[[Net], Any]] = {
    "an attribute": lambda net: setattr(net, "power", 3),
    "a constant": lambda net: net.shift.add_(1),
    "frozen": lambda net: net.first.requires_grad_(requires_grad=False),
    "another dtype": lambda net: net.double(),
    "equal values": copy_value,
    "tied": tie,
    "eval mode": lambda net: net.eval(),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Traces a model changed so; how many were really traced so far."""
    made: list[Any] = []
    real = shared_traces.trace

    def count(*args: Any, **kwargs: Any) -> Any:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(shared_traces, "trace", count)
    monkeypatch.setattr(autopar.planning.call_traces, "trace", real)  # as it was, when this test ends
    share_traces(tmp_path)

    def trace_one(change: Callable[[Net], Any] = lambda net: None, size: int = 4) -> int:
        torch.manual_seed(0)
        net = Net()
        change(net)
        inputs = {"x": torch.ones(size, 8, dtype=net.first.weight.dtype)}
        found = trace_model(net, inputs)
        assert found.program.type_of(found.program.inputs[0]).shape == (size, 8)
        (x,) = found.flatten_inputs((), inputs)
        assert x.equal(inputs["x"])
        return len(made)

    return trace_one


def test_equal_models_are_traced_once(traced: Callable[..., int]):
    assert [traced(), traced()] == [1, 1]
    assert [traced(size=8), traced(size=8)] == [2, 2]


def test_whatever_a_trace_can_see_makes_it_another(traced: Callable[..., int]):
    counts = [traced(), *(traced(change) for change in CHANGES.values())]
    assert counts == list(range(1, len(counts) + 1))


def test_a_model_that_asks_for_its_rank_is_traced_on_each(traced: Callable[..., int]):
    def asks(net: Net) -> None:
        net.differs_by_rank = True

    assert [traced(asks), traced(asks)] == [1, 2]
