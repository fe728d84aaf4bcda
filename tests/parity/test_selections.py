"""``x[mask]`` that ends in a sum, a mean or a loss trains as on one device, without a size that depends on values."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import TraceError
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.trace import trace
from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

Call = Callable[[Any, Tensor, Tensor], Any]


class Network(nn.Module):
    """Token logits, a mask and classes."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.body, self.head, self.call = nn.Linear(8, 8), nn.Linear(8, 6), call

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """[batch, sequence, 8], [batch, sequence] -> a scalar."""
        return self.call(self, self.body(x), labels)


def packed(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    logits, flat = net.head(x).view(-1, 6), labels.view(-1)
    return nn.CrossEntropyLoss()(logits[flat != -100], flat[flat != -100])


def head_on_selected(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    hidden = functional.layer_norm(torch.tanh(net.body(x[mask])), (8,))
    return functional.cross_entropy(net.head(hidden), labels[mask], reduction="sum", label_smoothing=0.1)


def by_token(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    loss = functional.cross_entropy(net.head(x).transpose(1, 2), labels, reduction="none")
    mask = labels != -100
    return loss[mask].mean() + loss.masked_select(mask).sum() / mask.sum()


def distances(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels.eq(2) | labels.eq(3)
    chosen = x[mask]
    error = (chosen - 2.0 * chosen.detach()) ** 2 / (1 + chosen.abs())
    return (
        error.sum(-1).sqrt().mean() - 0.1 * functional.mse_loss(chosen, torch.tanh(chosen)) + chosen.mean(dim=0).sum()
    )


def only_positive(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    """The logarithm and its slope are no numbers where nothing is selected."""
    y = torch.where(x > 0, x, 0.0)
    return -y[y > 0].log().mean() + (1 / y[y > 0]).clamp(max=3.0).sum()


def added(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    """Rows for what is selected, added and written back, as vision models do with features of images."""
    rows, one = net.body(x.flatten(0, 1)[:CHOSEN]), net.body(x[0, :1])
    mask, hidden, flat = labels == 5, x.clone(), x.clone().flatten(0, 1)
    hidden[mask, :] = hidden[mask, :] + rows
    hidden[mask] *= 1 + one
    chosen = mask.flatten()
    flat[chosen] = functional.layer_norm(rows / flat[chosen].exp(), (8,)).to(flat.dtype)
    return net.head(hidden).square().mean() + net.head(flat).mean() + functional.l1_loss(x[mask, ...], rows)


CHOSEN = 6
CALLS: dict[str, Call] = {
    "packed": packed, "head": head_on_selected, "token": by_token, "distances": distances, "positive": only_positive,
    "added": added,
}  # fmt: skip


@cache
def subject_of(name: str) -> Subject:
    torch.manual_seed(0)
    labels = torch.randint(-1, 5, (4, 4))
    labels.view(-1)[::3] = 5  # six of them
    inputs = {"x": torch.randn(4, 4, 8, dtype=torch.float64), "labels": labels.masked_fill(labels < 0, -100)}
    return trained_alone(Network(CALLS[name]).double(), inputs)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("constraint", ["data=2", "tensor=2", "microbatches=2"])
def test_it_trains_as_on_one_device(name: str, constraint: str) -> None:
    who = subject_of(name)
    if name in ("positive", "added") and constraint == "microbatches=2":  # how many are selected, and where, needs all
        assert not isinstance(time_assignment(who.traced.program, 2), TimeAssignment)
        return
    plan = forced_plan(who.traced.program, 2, constraint)
    assert_parity(who, plan)
    assert not math.isnan(who.alone.losses[-1])


@pytest.mark.parametrize("name", CALLS)
def test_it_trains_by_random_plans(name: str) -> None:
    # Of what is detached, random plans price a backward that does not run.
    assert_parity(subject_of(name), random_plan(subject_of(name).traced.program, 4, seed=1), priced=name != "distances")


def changed_between(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    mask = labels > 0
    first = x[mask]
    mask.logical_not_()
    return (first - x[mask]).sum()


def written_elsewhere(net: Any, x: Tensor, labels: Tensor) -> Tensor:
    y = x.clone()
    y[labels > 1] = x[labels > 0]
    return y.sum()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda net, x, labels: x[labels > 0] @ x[labels > 0].mT, r"test_selections\.py:\d+: .*mT .*depends on values"),
        (lambda net, x, labels: x[labels > 0].sort(0)[0].sum(), "sort of what a boolean mask selects needs a size"),
        (lambda net, x, labels: x[labels > 0].sum() / x[labels > 0].shape[0], "shape of what a boolean mask selects"),
        (
            lambda net, x, labels: (x[labels > 0] - x[labels > 1]).sum(),
            "what another mask selects .use one mask tensor",
        ),
        (lambda net, x, labels: x[labels > 0].softmax(0).sum(), "softmax of what a boolean mask selects"),
        (changed_between, "what another mask selects"),
        (written_elsewhere, "what another mask selects"),
    ],
)
def test_what_needs_the_size_is_refused(call: Call, told: str) -> None:
    labels = torch.randint(0, 6, (4, 4))
    with pytest.raises(TraceError, match=told):
        trace(Network(call), (torch.randn(4, 4, 8), labels), {})


def test_tensors_are_not_taken_for_sequences_after_a_trace() -> None:
    """As Python does once ``Tensor.__getitem__`` was replaced, even by itself."""
    trace(Network(packed), (torch.randn(4, 4, 8), torch.randint(0, 6, (4, 4))), {})
    assert torch.tensor([torch.tensor(1.5), torch.tensor(2.5)]).tolist() == [1.5, 2.5]
