"""Tensors that forward reads from global variables, closures and objects: constants, which get no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.outside_tensors import OutsideTensor
from autopar.trace import trace

X = torch.randn(4, 8)
TABLE = torch.arange(8.0)


class Reader(nn.Module):
    """Adds what a function from elsewhere gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(8, 8), function
        self.scale = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * self.scale + self.function(x) + TABLE).square().sum()


def test_what_would_get_a_gradient_is_refused() -> None:
    head = nn.Linear(8, 8)
    model = Reader(lambda x: head(x))
    match = (
        r"test_outside_tensors\.py:\d+: forward reads a tensor \(float32 \[8, 8\]\) that requires a gradient and is not"
    )
    with pytest.raises(TraceError, match=match):
        trace(model, (X,), {}, training=True)
    trace(model, (X,), {}, training=False)
    head.requires_grad_(False)
    trace(model, (X,), {}, training=True)


def without_gradients(head: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return head(x)


def detached(head: nn.Module, x: Tensor) -> Tensor:
    return head(x).detach()


def compared(head: nn.Module, x: Tensor) -> Tensor:
    return head(x) > 0


@pytest.mark.parametrize("use", [without_gradients, detached, compared])
def test_what_gets_none_is_a_constant_that_is_known(use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    head = nn.Linear(8, 8)
    traced = trace(Reader(lambda x: use(head, x)), (X,), {}, training=True)
    # The model's own attribute is compared in another way.
    assert {id(each.tensor()) for each in traced.outside} == {id(head.weight), id(head.bias), id(TABLE)}


def write(p: Tensor) -> None:
    p.detach().mul_(2)


def write_past_autograd(p: Tensor) -> None:
    p.data.mul_(2)


def replace(p: Tensor) -> None:
    p.data = 2 * p.data


@pytest.mark.parametrize("change", [write, write_past_autograd, replace])
def test_changes_are_noticed(change: Callable[[Tensor], None]) -> None:
    head = nn.Linear(8, 8).requires_grad_(False)
    traced = trace(Reader(lambda x: head(x)), (X,), {}, training=True)
    assert [x.is_changed(reads_entries=True) for x in traced.outside] == [False] * 3
    change(head.weight)
    assert [x.shape for x in traced.outside if x.is_changed(reads_entries=True)] == [(8, 8)]


def test_nans_are_equal_and_what_is_gone_does_not_change() -> None:
    table = torch.full((8,), torch.nan)
    known = OutsideTensor.of(table, "here", traced=table)
    assert not known.is_changed(reads_entries=True)
    table[::2] = 0
    assert known.is_changed(reads_entries=True)
    del table
    assert not known.is_changed(reads_entries=True)
