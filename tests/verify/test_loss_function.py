"""Plans for a model whose loss is computed outside of it: parity with one device, microbatches included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.trace import LossFunction

CLUSTER = autopar.Cluster.of("cpu", devices_per_node=2)
X, LABELS, VALUES = torch.randn(8, 8), torch.arange(8) % 4, torch.randn(8, 4)
MASK = (torch.arange(8) % 3 > 0).float()  # microbatches hold different numbers of samples that count


def masked(outputs: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (functional.cross_entropy(outputs, labels, reduction="none") * mask).sum() / mask.sum()


LOSSES: dict[str, tuple[LossFunction, Any]] = {
    "class": (nn.CrossEntropyLoss(ignore_index=0), LABELS),
    "class weights": (nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 3.0])), LABELS),
    "function": (functional.mse_loss, VALUES),
    "mask": (masked, (LABELS, MASK)),
    "lambda": (
        lambda outputs, y, keep: functional.cross_entropy(outputs, torch.where(keep > 0, y, -100)),
        {"y": LABELS, "keep": MASK},
    ),
}
SPLITS = (("data=2",), ("tensor=2", "microbatches=2"), ("data=2", "microbatches=2"))


@pytest.mark.parametrize(
    ("loss", "constraints"),
    [*(("class", each) for each in SPLITS), ("class weights", SPLITS[1]), *((name, SPLITS[2]) for name in LOSSES
                                                                          if name != "class")],
)  # fmt: skip
def test_parity_with_one_device(loss: str, constraints: Sequence[str]) -> None:
    loss_fn, target = LOSSES[loss]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = autopar.plan(model, CLUSTER, (X,), loss_fn=loss_fn, example_target=target, constraints=constraints)
    assert plan.num_microbatches == (2 if "microbatches=2" in constraints else 1)
    report = autopar.verify(model, plan, (X,), loss_fn=loss_fn, example_target=target)
    assert set(report.gradient_errors) == set(dict(model.named_parameters()))
