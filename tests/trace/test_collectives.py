"""A model that communicates would add up the whole batch of every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn import functional

from autopar.errors import TraceError
from autopar.trace import trace
from tests.ranks import run_ranks


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        center = y.detach().sum(0)
        dist.all_reduce(center)
        return (y - center).square().mean()


class Averaged(Centered):
    """By a collective that has gradients, which torch.export refuses with advice of its own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y - functional.all_reduce(y.mean(0))).square().mean()


def check() -> None:
    with pytest.raises(TraceError, match=r"test_collectives\.py:\d+: the model calls torch.distributed.*all_reduce"):
        trace(Averaged(), (torch.randn(4, 8),), {})
    with pytest.raises(TraceError, match=r"test_collectives\.py:\d+: the model calls torch.distributed"):
        trace(Centered(), (torch.randn(4, 8),), {})


@pytest.mark.slow
def test_a_model_that_communicates_is_refused() -> None:

    run_ranks(check, 2)
