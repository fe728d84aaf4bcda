"""The gradients of a step, released by its loss."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from autopar.lower.run.run_step import release_later


@pytest.mark.parametrize(
    ("scale", "is_scaled", "is_spread"), [(1.0, False, False), (1.0, True, True), (4.0, False, True)]
)
def test_overflows_are_spread_where_there_may_be_a_gradient_scaler(
    scale: float, is_scaled: bool, is_spread: bool
) -> None:
    spread: list[Sequence[Tensor | None]] = []
    parameter = nn.Parameter(torch.zeros(2))
    loss = release_later(torch.tensor(1.0), [torch.ones(2)], [parameter], spread.append, is_scaled=is_scaled)
    (loss * scale).backward()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [scale, scale]
    assert len(spread) == is_spread
