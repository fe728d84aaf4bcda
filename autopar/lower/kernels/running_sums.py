"""Running sums along a dim that is split: every slice adds what the slices before it sum to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards

__all__ = ["running_sum"]


def running_sum(shards: Shards, x: Tensor, dim: int) -> Tensor:
    """``cumsum`` of this device's slice of `x` in dim `dim`, which is the dim that is summed along.

    Communicates the total of a slice, which travels round a ring on the one axis of `shards`; and that of the gradient
    in backward, if `x` has one.

    Args:
        shards: of that dim.
        x: this device's equal slice.
        dim: as in torch.
    """
    return call_function(_RunningSum, x, shards, dim)


class _RunningSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, dim: int) -> Tensor:
        ctx.shards, ctx.dim = shards, dim
        sums = x.cumsum(dim)
        return sums + _total_of_others(shards, sums.narrow(dim, x.shape[dim] - 1, 1), before=True)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        dim = int(ctx.dim)
        sums = gradients[0].flip(dim).cumsum(dim).flip(dim)
        return sums + _total_of_others(ctx.shards, sums.narrow(dim, 0, 1), before=False), None, None


def _total_of_others(shards: Shards, total: Tensor, *, before: bool) -> Tensor:
    """The sum of the totals of all slices before this one, or of all after it."""
    travelling, found = total.contiguous(), torch.zeros_like(total)
    for step in range(1, shards.count):
        travelling = shards.start_passing(travelling).wait()
        if (shards.index - step >= 0) == before:  # else it comes from a slice at the other end
            found = found + travelling
    return found
