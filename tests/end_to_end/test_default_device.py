"""A script that says on which device its tensors are made: everything of ours still lies where it is used.

The device that it says is the meta device, whose tensors have no values, so that none of ours may be made there unseen.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.end_to_end.harness import assert_near, launch, parallelize, state_of

pytestmark = pytest.mark.slow
PLANS = (("data=2",), ("zero=3",), ("tensor=2",), ("pipeline=2",), ("recompute=full", "data=2"), ())


class Net(nn.Module):
    """Embeddings with places that are made in forward, without a device, attention, dropout and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, tokens] -> a scalar."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def batch(rows: int, length: int = 8) -> Tensor:
    return torch.randint(32, (rows, length), generator=torch.Generator().manual_seed(rows), device="cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses: list[float] = []
    for ids in (batch(4), batch(3), batch(4, 6), batch(4)):
        loss = model(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check(constraints: tuple[str, ...]) -> None:
    single = Net().double()
    model = copy.deepcopy(single)
    expected = train(single, torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9))
    torch.set_default_device("meta")
    try:
        parallel = parallelize(model, (batch(4),), constraints=constraints)
        found = train(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9))
        state = state_of(parallel)
    finally:
        torch.set_default_device("cpu")
    assert found == pytest.approx(expected, rel=1e-9)
    assert_near(state, state_of(single), 1e-7, floor=1e-9)  # a bias in front of a batch norm is rounding


def test_training() -> None:
    launch(2, *(partial(check, constraints) for constraints in PLANS))
