"""Models that take gradients in their forward train as on one device; what can't be done says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import functional_call
from torch.func import grad as func_grad
from torch.nn import functional

from autopar.errors import TraceError
from autopar.trace import trace
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

Call = Callable[[Any, Tensor, Tensor], Tensor]


class Network(nn.Module):
    """A body, and what is computed with it."""

    def __init__(self, call: Call, *layers: nn.Module) -> None:
        super().__init__()
        self.body, self.call = nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 1)), call

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 8], [batch, 8] -> a scalar."""
        return self.call(self, x, y)


def penalty(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """As WGAN-GP has it, with inputs that are mixed."""
    mixed = torch.lerp(x, y, y[:, :1].sigmoid()).detach().requires_grad_(True)
    score = net.body(mixed)
    (gradient,) = grad(score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True, only_inputs=True)
    return net.body(x).mean() - net.body(y).mean() + 10 * (gradient.flatten(1).norm(2, dim=1) - 1).square().mean()


def forces(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """As of a potential: two gradients, one of which is a constant of the loss."""
    x = x.clone().requires_grad_()
    with torch.no_grad():
        scale = net.body(x).abs().mean()
    energy = (net.body(x) * net.body(x).detach()).sum()
    force = -torch.autograd.grad(energy, x, create_graph=True)[0]
    fixed = torch.autograd.grad(net.body(x).sum(), [x], retain_graph=True)[0]
    assert force.requires_grad
    assert not fixed.requires_grad
    return functional.mse_loss(force / (1 + scale), y) + (net.body(x + 0.1 * fixed) ** 2).mean()


def inner_steps(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """As MAML has it: two steps of gradient descent on one half, the loss on the other."""
    weights = dict(net.body.named_parameters())
    for _ in range(2):
        loss = functional_call(net.body, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return (functional_call(net.body, weights, (y,)) - 1).square().mean()


def inner_classes(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """The same with cross entropies, some of whose targets are ignored."""
    weights, targets = dict(net.body.named_parameters()), torch.where(y[:, 0] > 1, -100, y[:, 1:].argmax(1))
    hidden = functional_call(net.body, weights, (x,)) * y
    gradients = torch.autograd.grad(
        functional.cross_entropy(hidden, targets), list(weights.values()), create_graph=True
    )
    stepped = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return functional.cross_entropy(functional_call(net.body, stepped, (x,)) * y, targets, label_smoothing=0.1)


def twice(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """A second derivative, and inputs that something does not depend on."""
    x, y = x.requires_grad_(), y.clone().requires_grad_()
    first, unused = torch.autograd.grad(net.body(x).sum(), (x, y), create_graph=True, allow_unused=True)
    assert unused is None
    (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
    return (second - x).square().mean()


def orders(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """As of a differential equation: derivatives of derivatives, by one line of code."""
    u = x = (x + net.body(y)).requires_grad_()
    terms = []
    for _ in range(3):
        u = torch.autograd.grad((u.tanh() * u).sum(), x, create_graph=True)[0]
        terms.append((u - y).square().mean())
    return torch.stack(terms).sum()


def convolutions() -> list[nn.Module]:
    return [
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.LeakyReLU(0.2, inplace=True),
        nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 4, 2, bias=False, padding=1), nn.AvgPool2d(2, stride=1),
        nn.Tanh(), nn.Flatten(),
    ]  # fmt: skip


def norms() -> list[nn.Module]:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    return [nn.LayerNorm(16), nn.GELU(), layer, nn.GroupNorm(2, 16), nn.SiLU(), nn.RMSNorm(16)]


CASES: dict[str, tuple[Call, Callable[[], list[nn.Module]]]] = {
    "penalty": (penalty, convolutions),
    "norms": (penalty, norms),
    "forces": (forces, lambda: [nn.Tanh(), nn.Linear(16, 16), nn.Softplus()]),
    "inner_steps": (inner_steps, lambda: [nn.Tanh()]),
    "inner_classes": (inner_classes, lambda: [nn.Tanh()]),
    "inner_convolutions": (inner_steps, convolutions),
    "orders": (orders, list),
    "twice": (twice, lambda: [nn.Tanh()]),
}


@cache
def subject_of(name: str) -> Subject:
    torch.manual_seed(0)
    call, layers = CASES[name]
    model = Network(call, *layers()).double()
    return trained_alone(model, {"x": torch.randn(4, 8).double(), "y": torch.randn(4, 8).double()})


PLANS = (("tensor=2",), ("data=2", "zero=3"))
LONG = ("penalty", "norms", "inner_convolutions")  # seconds to trace


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        pytest.param(name, PLANS[number % 2], marks=pytest.mark.slow if name in LONG else ())
        for number, name in enumerate(CASES)
    ],
)  # fmt: skip
def test_it_trains_as_on_one_device(name: str, constraints: tuple[str, ...]) -> None:
    who = subject_of(name)
    plan = forced_plan(who.traced.program, 2, *constraints)
    # The last bias of the forces adds to nothing that is read with a gradient, yet one is priced.
    assert_parity(who, plan, priced=name != "forces")


REFUSED: dict[str, tuple[Call, list[nn.Module], str]] = {
    "dropout": (penalty, [nn.Dropout(0.5)], r"through aten\.native_dropout.*, which would draw other random numbers"),
    "batch norm": (penalty, [nn.BatchNorm1d(16)], "through what updates a buffer"),
    "backward": (lambda net, x, y: net.body(x).sum().backward(), [], r"calls backward\(\)"),
    "functional": (
        lambda net, x, y: func_grad(lambda x: net.body(x).sum())(x).sum(),
        [],
        r"takes a gradient by torch\.func",
    ),
    "written": (lambda net, x, y: grad((x.mul_(2) * net.body(y)).sum(), x)[0].sum(), [], "writes to in place"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_done_is_refused(name: str) -> None:
    call, layers, message = REFUSED[name]
    model = Network(call, *layers)
    with pytest.raises(TraceError, match=rf"test_inner_gradients\.py:\d+: the model .*{message}"):
        trace(model, (torch.randn(4, 8), torch.randn(4, 8)), {})
