"""Dropout that keeps a mask of one byte an element, and draws from a generator of one's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function

__all__ = ["dropout"]


def dropout(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Zero each element with probability `p` and scale the others by ``1 / (1 - p)``.

    Keeps one byte per element for backward.  `generator` is what the draws come from, by default torch's own.
    """
    if p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    return call_function(_Dropout, x, p, generator)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
        keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - p)
        return _scale_kept(x, keep, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _scale_kept(gradients[0], keep, ctx.scale), None, None


def _scale_kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """``x * keep * scale``, which dropout is forward and backward."""
    if x.device.type == "cpu":  # torch's own op multiplies mixed dtypes there, which took three times as long
        return keep.to(x.dtype).mul_(scale).mul_(x)
    return torch.ops.aten.native_dropout_backward(x, keep, scale)
