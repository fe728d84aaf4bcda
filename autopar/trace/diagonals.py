"""``x.fill_diagonal_(value)`` of a trace: torch writes to its memory by strides, which slices on devices don't have."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["written_diagonals"]


def written_diagonals() -> contextlib.AbstractContextManager[Any]:
    """Inside, it fills where the diagonal is, which has an entry in each row and column."""
    plain = Tensor.fill_diagonal_

    def fill_diagonal_(self: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
        if self.dim() != 2 or wrap:
            return plain(self, fill_value, wrap)
        rows, columns = self.shape
        # of ones, as torch.eye has no rule for slices in every dtype
        is_diagonal = torch.ones(rows, columns, dtype=torch.bool, device=self.device).tril().triu()
        return self.masked_fill_(is_diagonal, fill_value)

    return patch.object(Tensor, "fill_diagonal_", fill_diagonal_)
