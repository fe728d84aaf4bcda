"""Submodules of a parallel module that are called alone compute what those of the original do.  Ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import SubmoduleError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.planning.building import call_planner
from autopar.trace import trace
from tests.lower.runs import build
from tests.random_plans import random_plan


class Encoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        x = scale * self.norm(self.layers(x))
        self.layers.largest = x.amax(1)
        return x, x.sum(1)


class Contrast(nn.Module):
    """In the style of CLIP: methods that call a part, which has a place in the loss, too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.image, self.text = Encoder(width), Encoder(width)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.image(image)[0] @ self.text(text)[0].T, torch.arange(len(image)))

    def embed(self, image: Tensor) -> Tensor:
        return nn.functional.normalize(self.image(image, scale=2.0)[0])


def on_ranks(is_training: bool, check: Callable[[Any, Any, Tensor], Any], seed: int) -> None:
    """`check` of the parallel model, a model of one device and an input; calls of its parts are planned."""
    torch.manual_seed(0)
    model, batch = Contrast().double().train(is_training), torch.randn(2, 4, 8, dtype=torch.float64)
    traced = trace(model, tuple(batch), {}, training=True)
    plan = random_plan(traced.program, 2, seed)
    planner, x = call_planner(model, traced, plan), torch.randn(6, 8, dtype=torch.float64)
    planner((x,), {"scale": 2.0}, is_training, "image")
    simulate(
        2, lambda c: check(build(model, traced, plan, c, planner=planner).train(is_training), copy.deepcopy(model), x)
    )


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_training", [True, False])
def test_a_submodule_runs_alone(is_training: bool, seed: int) -> None:
    def check(parallel: Any, single: Any, x: Tensor) -> None:
        found, expected = parallel.embed(x), single.embed(x)
        torch.testing.assert_close(found + 0, expected, rtol=1e-12, atol=1e-12)
        kept = parallel.image.layers.largest + 0
        torch.testing.assert_close(kept, single.image.layers.largest, rtol=1e-12, atol=1e-12)
        assert [call.part for call in parallel.plans].count("image") == 1
        if is_training:
            found.square().sum(0)[0].backward()
            expected.square().sum(0)[0].backward()
            for name, p in single.named_parameters():
                mine = parallel.get_parameter(name).grad
                assert (mine is None) == (p.grad is None), name
            for model in (parallel, single):
                torch.optim.SGD(model.parameters(), lr=1.0).step()
        state = parallel.full_state_dict()
        for name, value in single.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)

    on_ranks(is_training, check, seed)


def test_a_copy_of_a_submodule_does_not_run_on_the_parameters_of_the_model() -> None:
    def check(parallel: Any, _: Any, x: Tensor) -> None:
        with pytest.raises(SubmoduleError, match=r"this Encoder is a copy of 'image'.*Copy the whole model"):
            copy.deepcopy(parallel.image)(x, scale=2.0)
        whole = copy.deepcopy(parallel)
        with torch.no_grad():
            whole.image.norm.bias.add_(1)
        assert not torch.allclose(whole.embed(x), parallel.embed(x))

    on_ranks(False, check, 0)


def test_with_local_inputs_a_submodule_takes_the_same_on_every_rank() -> None:
    def check(parallel: Any, single: Any, x: Tensor) -> None:
        parallel.call_inputs = SimpleNamespace(is_local=True, whole=lambda _, *call: call)
        torch.testing.assert_close(parallel.embed(x), single.embed(x))
        assert parallel.call_inputs.is_local

    on_ranks(False, check, 0)
