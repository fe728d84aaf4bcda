"""Reads and writes past autograd in a forward: ``x.data``, and what is written in place without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace
from tests.trace.interpreter import interpret

Call = Callable[[Any, Tensor], Tensor]
ROWS = torch.randn(4, 8)


class Network(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.linear, self.scale = call, nn.Linear(8, 8), nn.Parameter(torch.tensor(5.0))
        self.register_buffer("sums", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """[4, 8] -> a scalar."""
        return self.call(self, x).square().sum()


def clamps_data(net: Any, x: Tensor) -> Tensor:
    net.scale.data.clamp_(0, 1)
    return net.linear(x) * net.scale


def sets_data(net: Any, x: Tensor) -> Tensor:
    net.scale.data = net.scale.data.clamp(0, 1)
    return net.linear(x) * net.scale


def clamps(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.scale.clamp_(0, 1)
    return net.linear(x) * net.scale


@pytest.mark.parametrize("call", [clamps_data, sets_data, clamps])
def test_writes_to_parameters_say_where_to_make_them(call: Call) -> None:
    expected = (
        r"the parameter 'scale' .*, where only buffers can be written to: .*after optimizer\.step\(\).*model\.scale"
    )
    with pytest.raises(TraceError, match=expected):
        trace(Network(call), (ROWS,), {})


def scales_by_the_first_batch(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    if not net.is_set:
        net.scale.data.copy_(1 / h.detach().std())
        net.is_set.fill_(True)
    return h * net.scale


def test_parameters_that_the_first_batch_sets_are_set_before() -> None:
    model = Network(scales_by_the_first_batch)
    model.register_buffer("is_set", torch.tensor(False))
    with pytest.raises(TraceError, match=r"'scale' .*buffer 'is_set' says, call the model before parallelize"):
        trace(model, (ROWS,), {})
    with torch.no_grad():
        expected = model(ROWS)
    (found,), _ = interpret(trace(model, (ROWS,), {}), model, [ROWS])
    torch.testing.assert_close(found, expected)


def other_shape(net: Any, x: Tensor) -> Tensor:
    net.sums.data = x
    return net.linear(x) + net.sums


def test_data_of_another_shape_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"test_past_autograd\.py:\d+: .*\[8\] values of .*\[4, 8\], but a program has fixed shapes"
    ):
        trace(Network(other_shape), (ROWS,), {})


def without_gradients(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    with torch.no_grad():
        h[:, 0] = 1
    return h.sin()


def in_a_view(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    with torch.no_grad():
        h[:, 1:].mul_(2)
    return h.sin()


def detached(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    h.detach().clamp_(-1, 1)
    return h.sin()


def to_data(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    h.data -= 1
    return h.sin()


def as_data(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    h.data = h.sign()
    return h.sin()


class Returned(Network):
    """Returns what it wrote to, and something else with a gradient."""

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        loss = h.square().sum()
        self.call(self, h)
        return loss, h


def masks_data(net: Any, h: Tensor) -> None:
    h.data.masked_fill_(h > 1, 0)


def clamps_detached(net: Any, h: Tensor) -> None:
    h[1:].detach().clamp_(-1, 1)


@pytest.mark.parametrize("call", [masks_data, clamps_detached])
def test_what_is_returned_after_a_write_past_autograd_would_have_no_gradient(call: Any) -> None:
    with pytest.raises(TraceError, match=r"test_past_autograd\.py:\d+: writes in place .*or returned"):
        trace(Returned(call), (ROWS,), {})


@pytest.mark.parametrize("call", [without_gradients, in_a_view, detached, to_data, as_data])
def test_writes_that_gradients_pass_by_are_refused(call: Call) -> None:
    with pytest.raises(TraceError, match=r"test_past_autograd\.py:\d+: writes in place .*past autograd.*\(new - x\)"):
        trace(Network(call), (ROWS,), {})
    network = Network(call)
    (found,), _ = interpret(trace(network, (ROWS,), {}, training=False), network, [ROWS])
    torch.testing.assert_close(found, network(ROWS))


def reads_before_it_changes(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    h -= h.data.amax()
    h.mul_(2)
    return h.sin()


def of_no_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.linear(x)
        h -= net.sums
        net.sums.data.mul_(0.9).add_(h.sum(0))
    return net.linear(x) + h


def read_no_more(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    y = h + 1
    h.detach().clamp_(-1, 1)
    return y


def wants_gradients_again(net: Any, x: Tensor) -> Tensor:
    h = net.linear(x)
    return h.detach().requires_grad_().sin() + h * h.detach()


@pytest.mark.parametrize("call", [reads_before_it_changes, of_no_gradient, read_no_more, wants_gradients_again])
def test_other_writes_are_traced(call: Call) -> None:
    assert trace(Network(call), (ROWS,), {}).program.layers
