"""An optimizer's state is given whole, and that of one device is loaded; closures run."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests import models
from tests.end_to_end.harness import launch, parallelize
from tests.lower.test_whole_matrices import Lamb

pytestmark = pytest.mark.slow


class Scale(nn.Module):
    """A parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), Scale())
    return model.double(), torch.randn(4, 8, dtype=torch.float64)


def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def assert_equal_values(model: Any, alone: nn.Module) -> None:
    found = model.full_state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def check_states(kind: Any) -> None:
    model, x = make()
    alone = copy.deepcopy(model)
    expected = kind(alone.parameters(), lr=0.1)
    for _ in range(2):
        step(alone, expected, x)

    parallel: Any = parallelize(model, (x,), constraints=("data=2", "zero=3"))
    optimizer = kind(parallel.parameters(), lr=0.1)
    for _ in range(2):
        step(parallel, optimizer, x)
    state = parallel.full_optimizer_state_dict(optimizer)
    torch.testing.assert_close(state, expected.state_dict(), rtol=1e-9, atol=1e-12)

    # A run goes on from the file of one device, and one device from the file of a run.
    further: Any = parallelize(copy.deepcopy(alone), (x,), constraints=("data=2", "zero=3"))
    loaded = kind(further.parameters(), lr=0.1)
    step(further, loaded, x)  # what it did is gone when a state is loaded, however often
    further.load_state_dict(alone.state_dict())
    for _ in range(3):
        loaded.load_state_dict(copy.deepcopy(expected.state_dict()))  # load_state_dict shares tensors
    back = copy.deepcopy(alone)
    taken = kind(back.parameters(), lr=0.1)
    taken.load_state_dict(state)
    for net, own in ((alone, expected), (further, loaded), (back, taken)):
        step(net, own, x)
    assert_equal_values(further, alone)
    torch.testing.assert_close(back.state_dict(), alone.state_dict(), rtol=1e-9, atol=1e-12)
    cut = [
        entry for own in loaded.state.values() for entry in own.values() if isinstance(entry, DTensor) and entry.dim()
    ]
    assert cut
    assert all(entry.to_local().shape != entry.shape for entry in cut)


def check_closure(make_optimizer: Any) -> None:
    """The closure runs the model several times (L-BFGS), or once (one that needs whole parameters)."""
    model, x = make()
    alone = copy.deepcopy(model)
    parallel: Any = parallelize(model, (x,), constraints=("data=2", "zero=3"))
    for net in (alone, parallel):
        optimizer = make_optimizer(net.parameters())

        def closure(net: Any = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_equal_values(parallel, alone)


def check_stages(kind: Any) -> None:
    """Saved with stages, loaded without and with them; then all go on alike."""
    model, inputs = models.make("plain_gpt")
    model.double()
    alone = copy.deepcopy(model)
    parallel: Any = parallelize(model, inputs, constraints=("pipeline=2",))
    own, other = (kind(net.parameters(), lr=0.01) for net in (alone, parallel))
    for net, optimizer in ((alone, own), (parallel, other)):
        train(net, optimizer, inputs)
    state = parallel.full_optimizer_state_dict(other)
    expected = own.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(state["state"], expected["state"], rtol=1e-9, atol=1e-12)

    further: Any = parallelize(copy.deepcopy(alone), inputs, constraints=("pipeline=2",))
    loaded = kind(further.parameters(), lr=0.01)
    loaded.load_state_dict(copy.deepcopy(expected))
    back = copy.deepcopy(alone)
    taken = kind(back.parameters(), lr=0.01)
    taken.load_state_dict(state)
    for net, optimizer in ((alone, own), (further, loaded), (back, taken)):
        train(net, optimizer, inputs)
    found, kept = further.full_state_dict(), back.state_dict()
    for name, value in alone.state_dict().items():
        if "qkv.bias" not in name:  # gradients of keys' biases are rounding noise, which Adafactor scales up
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(kept[name], value, rtol=1e-9, atol=1e-12)


def train(model: Any, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs)[1].backward()
        optimizer.step()


def test_states_and_closures() -> None:
    launch(
        2,
        *(partial(check_states, kind) for kind in (torch.optim.AdamW, torch.optim.RMSprop)),
        partial(check_closure, partial(torch.optim.LBFGS, max_iter=4)),
        partial(check_closure, Lamb),
        partial(check_stages, torch.optim.AdamW),
        partial(check_stages, partial(torch.optim.SGD, momentum=0.9)),
        partial(check_stages, torch.optim.Adafactor),
    )
