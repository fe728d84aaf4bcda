"""The bytes that optimizers keep, by name and as seen on small parameters, are those that they keep for a model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from autopar.errors import ConstraintError
from autopar.planning.optimizer_state import state_bytes_per_element
from tests.lower.test_whole_matrices import Lamb, Shampoo, Soap


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 512), nn.LayerNorm(512), nn.Linear(512, 640), nn.Conv2d(64, 128, 3))


class Sophie(torch.optim.AdamW):
    """A name that nobody knows."""


class Demanding(torch.optim.SGD):
    def __init__(self, params: Any, schedule: Any) -> None:
        super().__init__(params, lr=schedule(0))


class Averaging(torch.optim.SGD):
    """Evaluates with other parameters than those that it trains, as schedulefree does."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def step(self, closure: Any = None) -> Any:
        if not self.trains:
            raise RuntimeError("call train() first")
        return super().step(closure)


@pytest.mark.parametrize(
    "optimizer",
    [
        Sophie, HuggingFaceAdafactor, torch.optim.Adafactor, Lamb, Soap,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), lambda params: Shampoo(params, lr=1e-4),
    ],
)  # fmt: skip
def test_state_is_what_a_step_on_the_model_makes(optimizer: Any) -> None:
    net = model()
    expected = 0
    made = optimizer(net.parameters())
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    made.step()
    for state in made.state.values():
        lists = [x if isinstance(x, list) else [x] for x in state.values()]
        expected += sum(x.numel() * x.element_size() for each in lists for x in each if isinstance(x, torch.Tensor))
    found = state_bytes_per_element(net, optimizer) * sum(p.numel() for p in net.parameters())
    assert found == pytest.approx(expected, rel=0.02)


def test_optimizers_with_modes_step_in_training_mode() -> None:
    assert state_bytes_per_element(model(), functools.partial(Averaging, lr=0.1, momentum=0.9)) == 4


def test_names() -> None:
    net = model()
    assert state_bytes_per_element(net, "adamw") == 8
    assert state_bytes_per_element(net.bfloat16(), torch.optim.AdamW) == 4
    assert state_bytes_per_element(net, "AdamW8bit") == pytest.approx(2.03, rel=0.01)
    assert 0 < state_bytes_per_element(nn.Linear(2000, 1000), "adafactor") < 0.02
    for given, told in (("adamww", "did you mean 'adamw'"), (5, "optimizer=5 is not known")):
        with pytest.raises(ConstraintError, match=told):
            state_bytes_per_element(net, given)
    with pytest.raises(ConstraintError, match=r"TypeError in a step on one parameter.* Pass a function that makes it"):
        state_bytes_per_element(net, Demanding)
