"""Averages of weights as people keep them: torch's `AveragedModel`, and in the style of timm and of ema_pytorch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar.lower.communication.simulated_ranks import simulate
from autopar.plan import Plan
from autopar.trace import Traced, trace
from tests.lower.runs import build
from tests.models import make
from tests.random_plans import random_plan, with_stages


class ModelEma(nn.Module):
    """In the style of timm's ModelEmaV3."""

    def __init__(self, model: nn.Module, decay: float = 0.5, *, foreach: bool = False) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay, self.foreach = decay, foreach

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        own, new = self.module.state_dict().values(), model.state_dict().values()
        if self.foreach:
            pairs = [(a, b) for a, b in zip(own, new, strict=True) if a.is_floating_point()]
            torch._foreach_lerp_([a for a, _ in pairs], [b for _, b in pairs], weight=1 - self.decay)
            return
        for a, b in zip(own, new, strict=True):
            if a.is_floating_point():
                a.lerp_(b.to(device=a.device), weight=1 - self.decay)
            else:
                a.copy_(b)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class EMA(nn.Module):
    """In the style of ema_pytorch."""

    def __init__(self, model: nn.Module, beta: float = 0.5) -> None:
        super().__init__()
        self.beta = beta
        self.online_model = [model]
        self.ema_model = copy.deepcopy(model)
        for p in self.ema_model.parameters():
            p.detach_()
        self.ema_model.requires_grad_(False)
        self.names = {name for name, p in self.ema_model.named_parameters() if p.dtype == torch.float64}
        self.register_buffer("step", torch.tensor(0))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.step += 1
        pairs = [*zip(model.named_parameters(), self.ema_model.named_parameters(), strict=False)]
        pairs += [*zip(model.named_buffers(), self.ema_model.named_buffers(), strict=True)]
        for (name, current), (_, average) in pairs:
            if name in self.names and self.step > 1:
                average.data.lerp_(current.data, 1 - self.beta)
            else:
                average.data.copy_(current.data)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.ema_model(*args, **kwargs)


class Averaged(AveragedModel):
    """torch's, called as the others."""

    update = AveragedModel.update_parameters


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "timm": ModelEma,
    "timm foreach": lambda model: ModelEma(model, foreach=True),
    "ema_pytorch": EMA,
    "swa": Averaged,
    "torch ema": lambda model: Averaged(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True),
}


@cache
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], Traced]:
    model, inputs = make(name)
    return model, inputs, trace(model, (), inputs)


def follow(model: nn.Module, inputs: dict[str, Any], kind: str) -> list[Tensor]:
    """Losses of the average after each step."""
    ema = KINDS[kind](model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses: list[Tensor] = []
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        output = model(**inputs)
        loss = output[1]
        loss.backward()
        optimizer.step()
        ema.update(model)
        model.eval()
        with torch.no_grad():
            losses += [loss.detach(), ema(**inputs)[1], model(**inputs)[1], ema(**inputs)[0].sum()]
    return losses


def plans(traced: Traced) -> list[Plan]:
    staged = with_stages(random_plan(traced.program, 1, 3, 2), 2, "1f1b", 2, random.Random(0))
    return [*(random_plan(traced.program, 2, seed) for seed in range(2)), staged]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("kind", "number"), [(kind, number % 3) for number, kind in enumerate(KINDS)])
def test_an_average_is_the_single_devices(kind: str, number: int) -> None:
    model, inputs, traced = traced_model("plain_gpt")
    expected = follow(copy.deepcopy(model), inputs, kind)
    plan = plans(traced)[number]
    for found in simulate(plan.world_size, lambda c: follow(build(model, traced, plan, c), inputs, kind)):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
