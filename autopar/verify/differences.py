"""Differences of tensors of any dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["are_equal", "as_float64", "largest_difference", "largest_entry", "number_error", "relative_error"]


def as_float64(tensor: Tensor) -> Tensor:
    """The entries as float64: True becomes 1, and a complex number its real and imaginary part in a new last dim."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def are_equal(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether all corresponding numbers are equal; NaN equals NaN."""
    pairs = zip(first, second, strict=True)
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def number_error(expected: float, actual: float) -> float:
    """The difference of two numbers relative to `expected`; inf if one of them is NaN."""
    error = abs(expected - actual) / max(abs(expected), 1e-300)
    return float("inf") if math.isnan(error) else error


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
