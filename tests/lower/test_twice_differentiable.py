"""Gradients of a parallel model's inputs, taken outside of it with ``create_graph=True``, have gradients themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from autopar.errors import AutoparError, OutputError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.parallel_module import ParallelModule
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.objects.gradient_requests import GradientRequest, with_request
from autopar.planning.building import call_planner
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from tests.lower.runs import build, whole_gradients
from tests.zoo import quick, quick_search

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def wgan(critic: Any, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP, as its script writes it."""
    mixed = torch.lerp(real, fake, real[:, :1].sigmoid()).requires_grad_(True)
    score = critic(mixed)
    gradients = grad(
        outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True,
        only_inputs=True,
    )[0]  # fmt: skip
    penalty = ((gradients.view(len(gradients), -1).norm(2, dim=1) - 1) ** 2).mean()
    return critic(fake).mean() - critic(real).mean() + 10 * penalty


def r1(critic: Any, real: Tensor, fake: Tensor) -> Tensor:
    """StyleGAN2's penalty, whose score's own gradient is used as well."""
    real = real.detach().requires_grad_(True)
    score = critic(real)
    (gradient,) = grad(score.sum(), real, create_graph=True)
    return functional.softplus(-score).mean() + 5 * gradient.square().sum(1).mean() + 0 * critic(fake)[0].sum()


def equation(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """As of a differential equation: a derivative of a derivative."""
    x = x.clone().requires_grad_(True)
    u = net(x) * y
    first = grad(u, x, torch.ones_like(u), create_graph=True)[0]
    second = grad(first, x, torch.ones_like(first), create_graph=True)[0]
    return (second + first * u).square().mean()


class Scores(nn.Module):
    """Two outputs and an attribute; one argument has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> dict[str, Any]:
        """[batch, 8] -> [batch, 1] and [batch, 3]."""
        hidden = torch.tanh(self.body(x if shift is None else x + shift)) * scale * (1 + self.calls)
        self.size = hidden.square().mean()
        self.calls.add_(1)
        return {"name": "scores", "head": self.head(hidden), "other": self.other(hidden)}


def several(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on gradients of two outputs, by two inputs; the buffer that the call updates was another before."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = net(x, scale=2.0, shift=y)
    loss = out["head"].sum() + out["other"].square().sum()
    of_x, of_y = grad(loss, (x, y), create_graph=True)
    return loss + out["head"].mean() + (of_x * of_y.detach()).sum() + of_y.square().sum()


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def norms() -> nn.Module:
    return nn.Sequential(
        spectral_norm(nn.Linear(8, 16)), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(),
        nn.Linear(16, 1),
    )  # fmt: skip


def one(x: Tensor, level: int = 1) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls that a model with one input and output gets for gradients of it, so many times."""
    x = x.clone().requires_grad_()
    kwargs: dict[str, Any] = with_request({}, GradientRequest({0: torch.zeros(len(x), 1).double()}, (0,)))
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((x,), kwargs)]
    return (
        calls if level == 1 else [*calls, ((x,), with_request(kwargs, GradientRequest({0: torch.zeros_like(x)}, (0,))))]
    )


def of_scores(x: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    x = x.clone().requires_grad_()
    kwargs = {"scale": 2.0, "shift": x}
    of = {0: torch.zeros(len(x), 1).double(), 1: torch.zeros(len(x), 3).double()}
    return [((x,), kwargs), ((x,), with_request(kwargs, GradientRequest(of, (0, 1))))]


def on_ranks(
    model: nn.Module, constraints: Sequence[str], calls: Callable[[Tensor], Any], action: Callable[..., Any]
) -> list[Any]:
    """What `action` gives of the model, a copy of it on one device, and two batches, on each of two ranks.

    `calls` are planned before: ranks are threads, and tracing is for one at a time.
    """
    model = model.double().train()
    torch.manual_seed(1)
    x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    traced = trace_model(copy.deepcopy(model), (x.clone().requires_grad_(),), num_layers=2)
    request = SearchRequest(constraints=quick(tuple(constraints)), schedules=schedule_actions)
    plan = quick_search(traced.program, 2, request)
    planner = call_planner(model, traced, plan)
    for args, kwargs in calls(x):
        planner(args, kwargs, True, any_output="output_gradients" in kwargs)

    def rank(communicator: Any) -> Any:
        made = build(model, traced, plan, communicator, planner=planner).train()
        return action(made, copy.deepcopy(model), x.clone(), y.clone())

    return simulate(2, rank)


CASES: dict[str, tuple[Loss, Callable[[], nn.Module], Callable[[Tensor], Any], tuple[str, ...]]] = {
    "wgan": (wgan, dense, one, ("tensor=2",)),
    "sharded": (wgan, dense, one, ("data=2", "zero=3")),
    "norms": (r1, norms, one, ("data=2",)),
    "equation": (equation, dense, lambda x: one(x, 2), ("data=2",)),
    "several": (several, Scores, of_scores, ("tensor=2",)),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CASES)
def test_penalties_on_gradients_train_as_on_one_device(name: str) -> None:
    loss_of, make, calls, constraints = CASES[name]

    def rank(model: ParallelModule, single: nn.Module, x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            expected, found = loss_of(single, x, y), loss_of(model, x, y)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            expected.backward()
            found.backward()
        gradients = whole_gradients(model)
        for key, p in single.named_parameters():
            torch.testing.assert_close(gradients[key], p.grad, rtol=1e-10, atol=1e-12)
        state = model.full_state_dict()
        for key, buffer in single.named_buffers():
            torch.testing.assert_close(state[key], buffer, rtol=1e-12, atol=1e-12)

    torch.manual_seed(0)
    on_ranks(make(), constraints, calls, rank)


def test_a_gradient_without_a_graph_costs_no_other_program() -> None:
    def rank(model: ParallelModule, single: nn.Module, x: Tensor, y: Tensor) -> None:
        x.requires_grad_()
        for net in (single, model):
            (gradient,) = grad(net(x).square().sum(), x)
            assert not gradient.requires_grad
            y.add_(gradient)
        assert len(model.plans) == 1

    on_ranks(dense(), ("tensor=2",), lambda _: (), rank)


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], str]] = {
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        ("data=2",),
        "but the model draws random numbers",
    ),
    "stages": (dense, ("pipeline=2",), "which they don't have with pipeline stages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_gradients_is_refused(name: str) -> None:
    make, constraints, message = REFUSED[name]

    def rank(model: ParallelModule, single: nn.Module, x: Tensor, y: Tensor) -> None:
        with pytest.raises(AutoparError, match=message):
            wgan(model, x, y)

    on_ranks(make(), constraints, lambda _: (), rank)


def test_parameters_must_be_those_of_the_call() -> None:
    def rank(model: ParallelModule, single: nn.Module, x: Tensor, y: Tensor) -> None:
        score = model(x.requires_grad_())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        with pytest.raises(OutputError, match="parameters have changed since the call"):
            grad(score.sum(), x, create_graph=True)

    on_ranks(dense(), ("data=2",), one, rank)


def test_the_mode_must_be_that_of_the_call() -> None:
    def rank(model: ParallelModule, single: nn.Module, x: Tensor, y: Tensor) -> None:
        score = model(x.requires_grad_())
        model.eval()
        with pytest.raises(AutoparError, match="switched to another mode"):
            grad(score.sum(), x, create_graph=True)

    on_ranks(norms(), ("data=2",), one, rank)


def test_gradients_of_parameters_are_refused_not_dropped() -> None:
    def rank(model: ParallelModule, single: nn.Module, x: Tensor, y: Tensor) -> None:
        for wants in (False, True):
            score = model(x.clone().requires_grad_(wants)).sum()
            with pytest.raises(AutoparError, match="but not those of parameters: take"):
                grad(score, list(model.parameters()), create_graph=True)

    on_ranks(dense(), ("data=2",), one, rank)
