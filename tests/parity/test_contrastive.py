"""Losses that leave out the diagonal of a batch's similarities train as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar

ROWS, WIDTH = 8, 6


def off_diagonal_rows(z: Tensor) -> Tensor:
    similarities = z @ z.mT
    others = similarities[~torch.eye(len(z), dtype=torch.bool)].view(len(z), len(z) - 1)
    return (others.logsumexp(1) - similarities.roll(len(z) // 2, 1).diagonal()).mean()


def off_diagonal_covariances(z: Tensor) -> Tensor:
    covariances = torch.einsum("bc,bd->cd", z - z.mean(0), z) / len(z)
    return covariances[None, ..., ~torch.eye(z.shape[1], dtype=torch.bool)].square().sum(-1).mean()


def filled_diagonal(z: Tensor) -> Tensor:
    similarities, own = z @ z.mT, torch.zeros(len(z), len(z), dtype=torch.bool)
    similarities.fill_diagonal_(-1e9)
    weights = similarities.softmax(1).masked_fill(own.fill_diagonal_(True), 2.0)
    # More rows than columns: the diagonal ends with the columns.
    return (
        functional.cross_entropy(similarities, torch.arange(len(z)).roll(1)) + (weights @ z).fill_diagonal_(1.0).std()
    )


class Embedding(nn.Module):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, WIDTH), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.linear(x))


@pytest.mark.parametrize("loss", [off_diagonal_rows, off_diagonal_covariances, filled_diagonal])
@pytest.mark.parametrize("constraint", ["data=2", "tensor=2"])
def test_it_trains_as_on_one_device(loss: Callable[[Tensor], Tensor], constraint: str) -> None:
    torch.manual_seed(0)
    model, inputs = Embedding(loss), {"x": torch.randn(ROWS, 8)}
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=[constraint])
    autopar.verify(model, plan, inputs, steps=2)
