"""What is not exact yet is refused: windows by strides in a model that asks for values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace


class Windows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.as_strided((4, 3), (4, 1)).sum() if (x > 0).any() else y.sum()


def test_windows_by_strides_are_refused() -> None:
    with pytest.raises(TraceError, match="by as_strided, which together are not exact"):
        trace(Windows(), (torch.ones(4, 4),), {})
