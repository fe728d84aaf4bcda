"""How far tensors of any dtype are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["as_float64", "largest_difference", "largest_entry", "relative_error"]


def as_float64(tensor: Tensor) -> Tensor:
    """Its entries as float64: True is 1, and a complex number its two parts, in a last dim of their own."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def largest_entry(tensor: Tensor) -> float:
    """The largest magnitude; 0 if it has no entries."""
    return as_float64(tensor).abs().max().item() if tensor.numel() else 0.0


def largest_difference(first: Tensor, second: Tensor) -> float:
    """Of entries at the same place of two tensors of one shape."""
    return largest_entry(as_float64(first) - as_float64(second))


def relative_error(expected: Tensor, found: Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest entry of `expected` (or to `floor`, if that is larger).

    It is inf where shapes differ, one alone is complex, or one is not finite.
    """
    if expected.shape != found.shape or expected.is_complex() != found.is_complex():
        return float("inf")
    if not expected.numel():
        return 0.0
    difference = largest_difference(expected, found)
    scale = max(largest_entry(expected), floor)
    error = difference / scale if scale > 0 else difference
    return float("inf") if math.isnan(error) else error
