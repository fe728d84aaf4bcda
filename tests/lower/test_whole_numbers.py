"""A number of a parameter or of its gradient, as loops log them, is one device's on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.end_to_end.harness import launch, parallelize
from tests.ranks import RanksError

pytestmark = pytest.mark.slow


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double(), torch.randn(8, 8).double()


def numbers(model: Any, batch: torch.Tensor) -> list[float]:
    model(batch).square().sum().backward()
    logged = []
    for p in model.parameters():
        if p.numel():
            logged += [p.grad.norm(2).item(), p.detach().abs().max().item(), float(p.grad.mean()), p.data.sum().item()]
    return [*logged, max(p.grad.min().item() for p in model.parameters() if p.numel())]


def check_numbers(*constraints: str) -> None:
    model, batch = model_and_batch()
    found = numbers(parallelize(model, (batch,), constraints=constraints), batch)
    torch.testing.assert_close(found, numbers(model, batch), rtol=1e-12, atol=1e-12)


def check_a_rank_alone() -> None:
    model, batch = model_and_batch()
    parallel = parallelize(model, (batch,), constraints=("data=2", "zero=3"))
    if dist.get_rank():
        parallel(batch)
    else:
        parallel[0].weight.norm().item()


def test_numbers_are_those_of_one_device() -> None:
    launch(2, *(partial(check_numbers, *each.split()) for each in ("tensor=2", "data=2 zero=3", "data=2 zero=1")))


def test_a_rank_that_reads_alone_is_named() -> None:
    with pytest.raises(RanksError, match=r"reading a parameter or gradient .* all ranks must make the same calls"):
        launch(2, check_a_rank_alone)
