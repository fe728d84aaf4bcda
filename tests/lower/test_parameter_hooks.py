"""Hooks on gradients that parameters have before a model is parallelized run as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.end_to_end.harness import launch, parallelize

pytestmark = pytest.mark.slow


class Masked(nn.Module):
    """Registers hooks while it is made: one reads a buffer of it, one its parameter, one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("mask", (torch.arange(16) % 3 > 0)[:, None].double())
        self.up.weight.register_hook(lambda gradient: gradient * self.mask)
        weight = self.down.weight
        weight.register_hook(lambda gradient: gradient + 0.5 * weight.detach())
        self.seen = list[float]()
        self.up.bias.register_post_accumulate_grad_hook(lambda p: self.seen.append(p.grad.norm().item()))
        self.down.bias.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()) + x


def train(model: Any, x: Tensor) -> tuple[list[float], list[float]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.item())
    return losses, model.seen


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return Masked().double(), torch.randn(4, 8).double()


def check(constraints: tuple[str, ...], expected: Any) -> None:
    model, x = made()
    torch.testing.assert_close(train(parallelize(model, (x,), constraints=constraints), x), expected, rtol=1e-9, atol=0)


def test_hooks_from_before_are_those_of_one_device() -> None:
    model, x = made()
    expected = train(model, x)
    assert len(expected[1]) == 3
    plans = (("data=2", "zero=3"), ("data=2", "zero=0"), ("tensor=2",), ("pipeline=2",))
    launch(2, *(partial(check, constraints, expected) for constraints in plans))
