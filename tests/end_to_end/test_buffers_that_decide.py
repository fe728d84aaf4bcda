"""Flags and counters in buffers that a forward branches on: on real processes as on one device."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import RankError
from tests.end_to_end.harness import launch, parallelize

pytestmark = pytest.mark.slow
CONSTRAINTS = ("data=2", "zero=3", "tensor=2", "pipeline=2")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


class Codes(nn.Module):
    """Codes that the first batch sets, and an average moves afterwards, as vector quantization does; [n, 16] -> [n,
    16].
    """

    initted: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initted", torch.tensor([False]))
        self.register_buffer("codes", torch.zeros(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        """The nearest code of each row, with the gradient of the row."""
        if not self.initted:
            self.codes.data.copy_(x.detach()[:4])
            self.initted.data.copy_(torch.Tensor([True]))
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        chosen = nn.functional.one_hot(nearest, 4).to(x.dtype)
        result = x + (chosen @ self.codes - x).detach()
        if self.training:
            counts = chosen.sum(0).clamp(min=1)
            self.codes.lerp_(chosen.T @ x.detach() / counts[:, None], 0.1)
        return result


class Model(nn.Module):
    """Warms up for two steps."""

    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.codes, self.last = nn.Linear(16, 16), Codes(), nn.Linear(16, 16)
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 16] -> a scalar."""
        h = self.first(x)
        quantized = self.codes(h)
        if self.training:
            self.step += 1
        return (self.last(h if self.step.item() <= 2 else quantized) - x).square().mean()


class Coupling(nn.Module):
    """Moves the features that a mask chooses by what the others say, and then those others, as coupling flows do."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(16, 16), nn.Linear(8, 8)
        self.register_buffer("mask", torch.arange(16) % 2 == 0)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 16] -> a scalar."""
        y = self.first(x)
        moved = y.clone()
        moved[:, self.mask] = y[:, self.mask] * self.scale(y[:, ~self.mask]).exp()
        return moved.square().mean() - self.scale(y[:, ~self.mask]).mean()


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[float] = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(X)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def check_training(constraint: str) -> None:
    alone, parallel = made(), parallelize(made(), (X,), constraints=(constraint,))
    torch.testing.assert_close(losses(parallel), losses(alone), rtol=1e-5, atol=1e-6)
    for (name, mine), wanted in zip(parallel.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6, msg=name)
    assert len(parallel.plans) == 3, [call.inputs for call in parallel.plans]


def check_masks(constraint: str) -> None:
    torch.manual_seed(0)
    alone = Coupling()
    parallel = parallelize(copy.deepcopy(alone), (X,), constraints=(constraint,))
    torch.testing.assert_close(losses(parallel), losses(alone), rtol=1e-5, atol=1e-6)
    assert len(parallel.plans) == 1
    for model in (alone, parallel):
        model.get_buffer("mask").logical_not_()
    torch.testing.assert_close(losses(parallel), losses(alone), rtol=1e-5, atol=1e-6)
    assert len(parallel.plans) == 2


def check_other_buffers_on_a_rank() -> None:
    parallel = parallelize(made(), (X,), constraints=("data=2",))
    losses(parallel)
    if dist.get_rank():
        parallel.get_buffer("step").fill_(0)
    with pytest.raises(RankError, match=r"'step'.*giving (True|False)"):
        parallel(X)


def test_training_is_that_of_one_device_through_all_branches() -> None:
    launch(2, *(partial(check_training, each) for each in CONSTRAINTS), check_other_buffers_on_a_rank)


def test_masks_among_buffers_choose_features_as_on_one_device() -> None:
    launch(2, *(partial(check_masks, each) for each in CONSTRAINTS))
