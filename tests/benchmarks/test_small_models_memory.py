"""Peaks of models with one property each that autograd's memory depends on, against what plans promise of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.predictions.memory import Case, measure_model

ROWS, LENGTH, WIDTH = 8, 16, 64


class _Cells(nn.Module):
    """A weight that is read in each step of a loop, in several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 2 * WIDTH)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state).square().mean()


class _Turned(nn.Module):
    """Rows of a linear layer that are no matrix without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(LENGTH, 4 * LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x.transpose(1, 2)).square().mean()


class _BiasedAttention(nn.Module):
    """Keys and values with a row more than queries, batches second."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].square().mean()


class _Projections(nn.Module):
    """A tensor of three dims whose gradient comes from three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.others = nn.ModuleList(nn.Linear(4 * WIDTH, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x))
        return torch.stack([other(hidden) for other in self.others]).square().mean()


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).prod(1).sum()


@pytest.mark.parametrize("model", [_Cells, _Turned, _BiasedAttention, _Projections, _Product])
def test_a_peak_is_not_above_the_promise(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    inputs: dict[str, Any] = {"x": torch.randn(ROWS, LENGTH, WIDTH)}
    outcome = measure_model(Case(model.__name__, 1, ()), model(), inputs)
    assert 0.95 < outcome.measured_peak / outcome.predicted_peak < 1.02
