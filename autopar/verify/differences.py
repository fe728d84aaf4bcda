"""Differences of tensors of any dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["as_float64", "largest_difference", "largest_entry", "relative_error"]


def as_float64(tensor: Tensor) -> Tensor:
    """The entries as float64: True becomes 1, and a complex number its real and imaginary part in a new last dim."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def largest_entry(tensor: Tensor) -> float:
    """The largest absolute value of an entry; 0 if there are no entries."""
    return as_float64(tensor).abs().max().item() if tensor.numel() else 0.0


def largest_difference(first: Tensor, second: Tensor) -> float:
    """The largest absolute difference of corresponding entries of two tensors of equal shape."""
    return largest_entry(as_float64(first) - as_float64(second))


def relative_error(expected: Tensor, actual: Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest entry of `expected` (or to `floor`, if that is larger).

    It is inf if shapes differ, only one of them is complex, or one is not finite.
    """
    if expected.shape != actual.shape or expected.is_complex() != actual.is_complex():
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = largest_difference(expected, actual)
    scale = max(largest_entry(expected), floor)
    error = difference / scale if scale > 0 else difference
    return float("inf") if math.isnan(error) else error
