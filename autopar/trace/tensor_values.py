"""Tensors as plain data, which can be compared, hashed and stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["TensorValues", "values_of"]


class TensorValues(NamedTuple):
    """A tensor as plain data: its shape, its entries in row-major order, and its dtype."""

    shape: tuple[int, ...]
    values: tuple[Any, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """The tensor."""
        return torch.tensor(self.values, dtype=self.dtype, device=device).view(self.shape)


def values_of(x: Tensor) -> TensorValues:
    """A tensor as plain data."""
    numbers: Any = x.detach().flatten()
    return TensorValues(tuple(x.shape), tuple(numbers.tolist()), x.dtype)
