"""``F.ctc_loss`` with tensors as lengths trains as on one device, however the targets are padded."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone


class Recognizer(nn.Module):
    """Frames to symbols; labels of -100 don't count."""

    def __init__(self, targets: str, reduction: str) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.targets, self.reduction = targets, reduction

    def forward(self, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        """[batch, frames, 6], [batch], [batch, symbols] -> a scalar."""
        log_probs = functional.log_softmax(self.head(self.body(x).relu()), -1).transpose(0, 1)
        counts = labels >= 0
        if self.targets == "selected":  # as Hugging Face's models do it
            flat, own = labels.masked_select(counts), counts.sum(-1)
            found = functional.ctc_loss(log_probs, flat, lengths, own, reduction=self.reduction, zero_infinity=True)
        elif self.targets == "flat":
            flat, own = labels.clamp_min(1).flatten(), torch.full_like(lengths, labels.shape[1])
            found = functional.ctc_loss(log_probs, flat, lengths, own, reduction=self.reduction, zero_infinity=True)
        else:
            criterion = nn.CTCLoss(blank=4, reduction=self.reduction, zero_infinity=True)
            found = criterion(log_probs, labels.clamp_min(0), lengths, counts.sum(-1))
        return found.square().sum() if self.reduction == "none" else found


@cache
def subject_of(targets: str, reduction: str) -> Subject:
    torch.manual_seed(0)
    labels = torch.randint(1, 4, (4, 4))
    labels[1, 2:] = labels[2, 0] = labels[3, 1] = -100
    labels = labels if targets == "selected" else labels.sort(1, descending=True)[0]
    x: Any = torch.randn(4, 12, 6, dtype=torch.float64)
    inputs = {"x": x, "lengths": torch.tensor([12, 10, 2, 9]), "labels": labels}
    return trained_alone(Recognizer(targets, reduction).double(), inputs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("targets", "reduction"), [("padded", "mean"), ("padded", "none"), ("selected", "sum"), ("flat", "mean")]
)
def test_it_trains_as_on_one_device(targets: str, reduction: str) -> None:
    who = subject_of(targets, reduction)
    losses = [
        op for layer in who.traced.program.layers for op in layer.ops if op.target.startswith("autopar_traced.ctc")
    ]
    assert [{option.factor for option in op.options} >= {"b"} for op in losses] == [targets != "flat"]
    for constraint in ("data=2", "microbatches=2"):
        if constraint == "data=2" or targets != "flat":
            assert_parity(who, forced_plan(who.traced.program, 2, constraint))
    assert_parity(who, random_plan(who.traced.program, 4, seed=1))
