"""Hooks of optimizers see parameters and gradients of the whole model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.harness import launch, parallelize

BATCH = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def train(model: Any, kind: Any) -> list[float]:
    """Gradients are clipped by a hook before each step; one behind it logs norms, as do hooks that come later."""
    optimizer = kind(model.parameters(), lr=0.1)
    seen: list[float] = []

    def clip(*_: Any) -> None:
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)))

    def log(*_: Any) -> None:
        seen.extend(float(x.norm()) for p in model.parameters() for x in (p.detach(), p.grad))

    handles = [optimizer.register_step_pre_hook(clip), optimizer.register_step_post_hook(log)]
    for step in range(3):
        if step == 2:
            handles.append(optimizer.register_step_pre_hook(log))
        optimizer.zero_grad()
        model(BATCH).backward()
        optimizer.step()
    return seen


def check_hooks(constraint: str, kind: Any) -> None:
    found = train(parallelize(Chain().double(), BATCH, constraints=(constraint,)), kind)
    assert found == pytest.approx(train(Chain().double(), kind), rel=1e-9)


@pytest.mark.slow
def test_hooks_of_optimizers_see_the_whole_model() -> None:
    kinds = (torch.optim.SGD, torch.optim.Adafactor)
    launch(2, *(partial(check_hooks, plan, kind) for plan in ("zero=3", "pipeline=2") for kind in kinds))
