"""What normalizations of ``[batch, channels, ...]`` have in common."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["other_dims", "per_channel", "widened"]


def widened(x: Tensor) -> Tensor:
    """`x` in the dtype of statistics: float32, or float64 for float64."""
    return x if x.dtype is torch.float64 else x.float()


def per_channel(numbers: Tensor, x: Tensor) -> Tensor:
    """A number for each channel of `x`, to be broadcast over it."""
    return numbers.view([1, -1] + [1] * (x.ndim - 2))


def other_dims(x: Tensor) -> list[int]:
    """All dims but that of channels."""
    return [dim for dim in range(x.ndim) if dim != 1]
