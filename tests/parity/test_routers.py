"""Routers whose statistics are of the whole batch: biases that a forward updates, losses that balance experts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import ConstraintError
from autopar.ops.experts import EXPERTS
from autopar.search import SearchRequest, search

pytest.importorskip("transformers.integrations.moe")

from tests.parity.test_experts import NUM_EXPERTS, Routed
from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, forced_plan, quick_prices, trained_alone

RATE = 0.25  # large, so that a step changes who gets which row


class Biased(Routed):
    """Balanced without a loss, as DeepSeek-V3 is: a bias of each expert, by which only the choice goes.

    Every forward in training moves it towards experts that got fewer rows than the mean.  Two passes see each other's.
    """

    def __init__(self, favored: float, count: str, *, padded: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(8, NUM_EXPERTS, bias=False)
        self.register_buffer("bias", torch.zeros(NUM_EXPERTS))
        self.get_buffer("bias")[3] += favored
        self.count, self.padded = count, padded

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        hidden = self.mix(x)
        hidden = hidden + self.routed(hidden)
        return (hidden + self.routed(hidden)).square().mean()

    def routed(self, hidden: Tensor) -> Tensor:
        scores = self.router(hidden).sigmoid()
        ids = (scores + self.bias).topk(2, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.padded:  # rows that nobody reads
            weights = weights * (hidden.detach().sum(-1, keepdim=True) > 0)
        if self.training:
            rows = self.counted(ids).to(hidden.dtype)
            self.get_buffer("bias").add_(RATE * torch.sign(rows.mean() - rows))
        return self.experts(hidden, ids.reshape(-1), weights / (weights.sum(-1, keepdim=True) + 1e-9))

    def counted(self, ids: Tensor) -> Tensor:
        if self.count == "one_hot":
            return functional.one_hot(ids, NUM_EXPERTS).sum((0, 1))
        if self.count == "scatter_add":
            flat = ids.reshape(-1)
            return torch.zeros(NUM_EXPERTS, dtype=torch.int64).scatter_add(0, flat, torch.ones_like(flat))
        if self.count == "bincount":
            return torch.bincount(ids.reshape(-1), minlength=NUM_EXPERTS)
        return torch.histc(ids.reshape(-1).float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1)


@cache
def biased(favored: float, count: str, padded: bool = False) -> Subject:
    torch.manual_seed(0)
    return trained_alone(Biased(favored, count, padded=padded).double(), {"x": torch.randn(16, 8).double()})


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("favored", "count", "constraints"),
    [
        (0.0, "one_hot", ("data=2",)),
        (0.5, "histc", ("expert=2",)),
        (0.5, "scatter_add", ("data=2", "zero=3")),
        (0.5, "bincount", ("data=2",)),
        (50.0, "one_hot", ("tensor=2",)),  # one expert gets half of all rows, whatever is learned
    ],
)
def test_a_bias_that_a_forward_updates_is_that_of_the_whole_batch(
    favored: float, count: str, constraints: tuple[str, ...]
):
    who = biased(favored, count)
    assert [op.target for layer in who.traced.program.layers for op in layer.ops].count(EXPERTS) == 2
    assert who.traced.program.updates
    plan = forced_plan(who.traced.program, 2, *constraints)
    assert_parity(who, plan, priced=False)


def test_microbatches_would_update_a_bias_by_parts_of_the_batch():
    with pytest.raises(ConstraintError, match="microbatches would not be exact"):
        search(
            biased(0.0, "one_hot").traced.program, 2, quick_prices(2),
            SearchRequest(constraints=("microbatches=2", "data=2")),
        )  # fmt: skip


@pytest.mark.slow
def test_rows_without_weight_and_a_random_plan():
    who = biased(0.5, "one_hot", padded=True)
    for seed in range(2):
        assert_parity(who, random_plan(who.traced.program, 4, seed), priced=False)
