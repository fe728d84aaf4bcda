"""Buffers that forward replaces (``self.average = ...``) have one device's values, also inside of the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.planning.call_traces import trace_model


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("last", torch.ones(8))
        self.register_buffer("queue", torch.randn(8, 16))


class RunningAverage(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return (h - self.average).square().mean()


class Queue(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        loss = (h @ self.queue).square().mean()  # what this saves for backward is the queue before
        self.queue = torch.cat([h.detach().t(), self.queue[:, :8]], 1)
        return loss


class Swapped(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        loss = (h - self.last).square().mean() + (h * self.average).mean()
        self.last, self.average = self.average, self.last
        self.average = self.average + h.detach().mean(0)
        return loss


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([RunningAverage(), Queue(), Swapped()])

    def forward(self, x: Tensor) -> Tensor:
        return sum((part(x) for part in self.parts), self.parts[0](2 * x))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", [["data=2"], ["zero=3", "recompute=full"]])
def test_assigned_buffers_are_updated(constraints: list[str]) -> None:
    torch.manual_seed(0)
    model, inputs = Nested().double(), {"x": torch.randn(8, 8).double()}
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    report = autopar.verify(model, autopar.plan(model, cluster, inputs, constraints=constraints), inputs)
    assert report.parameter_error < 1e-12  # buffers after two steps included


@pytest.mark.parametrize(("given", "message"), [(None, "assigns None to the buffer average"), (1, r"int64 \[1\]")])
def test_what_is_no_value_of_a_buffer_is_refused(given: int | None, message: str) -> None:
    class Other(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            self.average = None if given is None else x[:1, 0].long()  # type: ignore[assignment]
            return self.linear(x).mean()

    with pytest.raises(TraceError, match=message):
        autopar.plan(Other(), autopar.Cluster.of("cpu", devices_per_node=2), {"x": torch.randn(8, 8)})


def test_a_table_that_grows_is_made_in_each_program() -> None:
    class Grown(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            if len(self.average) < x.shape[1] + 2:
                self.average = self.last.new_ones(x.shape[1] + 2) * 2
            return (self.linear(x) * self.average[:8]).square().mean()

    program = trace_model(Grown(), {"x": torch.randn(8, 8)}).program
    assert not program.updates
    assert [value.type.shape for value in program.values.values() if value.role == "constant"] == [(8,)]


class Made(Stateful):
    """Makes its buffer `table` in the first call, if there is none."""

    def __init__(self, *, is_named: bool = True) -> None:
        super().__init__()
        if is_named:
            self.register_buffer("table", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if getattr(self, "table", None) is None:
            table = torch.ones_like(h[0])
            table[1:] = self.last[1:] * torch.arange(7.0)
            self.register_buffer("table", table, persistent=False)
        return (h * self.table).square().mean()


@pytest.mark.parametrize("is_named", [True, False])
def test_buffers_that_forward_makes_once_are_made_in_each_program(is_named: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Made(is_named=is_named).double(), {"x": torch.randn(8, 8).double()}
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    report = autopar.verify(model, autopar.plan(model, cluster, inputs, constraints=["data=2"]), inputs)
    assert report.parameter_error < 1e-12
    assert report.worst_output[1] < 1e-12  # other values in `last` included


@pytest.mark.parametrize("is_written", [False, True])
def test_buffers_that_forward_makes_of_a_call_are_refused(is_written: bool) -> None:
    class OfCall(Made):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            first = h.detach().mean(0)
            if is_written:
                zeros = torch.zeros(8)
                zeros[:] = first
                first = zeros
            self.table = first if self.table is None else 0.9 * self.table + 0.1 * first
            return (h - self.table).square().mean()

    with pytest.raises(TraceError, match="makes the buffer table, which does not exist before"):
        trace_model(OfCall(), {"x": torch.randn(8, 8)})
