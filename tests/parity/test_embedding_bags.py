"""``nn.EmbeddingBag`` on bags of one size is split by the batch, and gives what torch's op gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar


class Clicks(nn.Module):
    def __init__(self, mode: str, padding: int | None, *, weighted: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(24, 8, mode=mode, padding_idx=padding)
        self.head, self.weighted = nn.Linear(8, 1), weighted

    def forward(self, ids: Tensor, weights: Tensor, clicks: Tensor) -> Tensor:
        made = self.bag(ids, per_sample_weights=weights if self.weighted else None)
        return functional.binary_cross_entropy_with_logits(self.head(made).squeeze(1), clicks)


@pytest.mark.parametrize(
    ("mode", "padding", "weighted"),
    [("mean", None, False), ("mean", -1, False), ("sum", 3, True), ("sum", None, False), ("max", None, False)],
)
def test_parity(mode: str, padding: int | None, weighted: bool) -> None:
    torch.manual_seed(0)
    model = Clicks(mode, padding, weighted=weighted).double()
    ids = torch.randint(24, (16, 5))
    ids[0] = 23 if padding == -1 else 3  # a bag of nothing but padding
    inputs = {"ids": ids, "weights": torch.rand(16, 5).double(), "clicks": torch.rand(16).double()}
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    constraints = ["data=2"] if mode == "max" else ["data=2", "microbatches=2"]
    plan = autopar.plan(model, cluster, inputs, constraints=constraints)
    report = autopar.verify(model, plan, inputs)
    assert max(report.loss_error, report.worst_gradient[1], report.parameter_error) < 1e-12


class Taught(nn.Module):
    def __init__(self, body: nn.Module, bag: nn.Module) -> None:
        super().__init__()
        self.body, self.bag = body, bag

    def forward(self, ids: Tensor, starts: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.body(ids) + self.bag(ids.flatten(), starts) + self.bag(ids), y)


@pytest.mark.parametrize("constraint", ["data=2", "tensor=2"])
def test_sparse_gradients_are_dense_ones(constraint: str) -> None:
    """They failed in the middle of a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(24, 8, sparse=True), nn.Flatten(), nn.Linear(40, 8)).double()
    model = Taught(model, bag=nn.EmbeddingBag(24, 8, sparse=True).double())
    inputs = {"ids": torch.randint(24, (16, 5)), "starts": torch.arange(0, 80, 5), "y": torch.rand(16, 8).double()}
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=[constraint])
    report = autopar.verify(model, plan, inputs)
    assert max(report.loss_error, report.worst_gradient[1], report.parameter_error) < 1e-12
