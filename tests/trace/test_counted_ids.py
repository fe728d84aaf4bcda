"""``torch.bincount`` with a minlength has that length in a trace."""

import pytest
import torch
from torch import nn

from tests.trace.interpreter import check_equals_model


class Counts(nn.Module):
    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.linear, self.dtype = nn.Linear(6, 6), dtype

    def forward(self, x, ids):
        weights = None if self.dtype is None else (ids + 1).to(self.dtype)
        counts = ids.bincount(weights, minlength=6) + torch.bincount(ids, minlength=6)
        return (self.linear(x) * counts.to(x.dtype)).mean()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int32])
def test_ids_are_counted_as_torch_counts_them(dtype):
    check_equals_model(Counts(dtype), {"x": torch.randn(4, 6), "ids": torch.tensor([0, 5, 1, 5])})
