"""Running sums and products along a dim that is split: slices combine their own with the totals of those before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards

__all__ = ["running_log_sum", "running_product", "running_sum"]


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
        return sums + _combined_others(shards, sums.narrow(dim, x.shape[dim] - 1, 1), 0.0, torch.add)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        dim = int(ctx.dim)
        sums = gradients[0].flip(dim).cumsum(dim).flip(dim)
        behind = _combined_others(ctx.shards, sums.narrow(dim, 0, 1), 0.0, torch.add, before=False)
        return sums + behind, None, None


def running_product(shards: Shards, x: Tensor, dim: int) -> Tensor:
    """``cumprod`` of this device's slice of `x` in dim `dim`, which is the dim that is multiplied along.

    Communicates as `running_sum`; in backward the gradient of what a slice gets from those before it travels with its
    total.

    Args:
        shards: of that dim.
        x: this device's equal slice.
        dim: as in torch.
    """
    products = x.cumprod(dim)
    return products * call_function(_ProductBefore, products.narrow(dim, x.shape[dim] - 1, 1), shards, dim)


class _ProductBefore(torch.autograd.Function):
    """The product of the totals t of all slices before this one, b = t[0] ... t[k - 1].

    With the gradients g of all b, that of t[m] is b[m] times the sum over k > m of g[k] t[m + 1] ... t[k - 1]: no
    division, so that zeros are no exception.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, shards: Shards, dim: int) -> Tensor:
        before = _combined_others(shards, total, 1.0, torch.mul)
        ctx.shards, ctx.dim = shards, dim
        ctx.save_for_backward(total, before)
        return before

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        total, before = ctx.saved_tensors
        terms, between = torch.zeros_like(total), torch.ones_like(total)
        for gradient, other in _pairs_behind(ctx.shards, gradients[0], total, ctx.dim):
            terms, between = terms + gradient * between, between * other
        return before * terms, None, None


def running_log_sum(shards: Shards, x: Tensor, dim: int) -> Tensor:
    """``logcumsumexp`` of this device's slice of `x` in dim `dim`, which is the dim that is summed along.

    Communicates as `running_product`.

    Args:
        shards: of that dim.
        x: this device's equal slice.
        dim: as in torch.
    """
    sums = x.logcumsumexp(dim)
    before = call_function(_LogSumBefore, sums.narrow(dim, x.shape[dim] - 1, 1), shards, dim)
    is_empty = before == -torch.inf  # where all slices before are, too; the gradient of logaddexp is NaN there
    return torch.where(is_empty, sums, torch.logaddexp(sums, torch.where(is_empty, 0.0, before)))


class _LogSumBefore(torch.autograd.Function):
    """The logarithm of the sum of exponentials of all slices before this one, of their totals t; -inf of the first.

    The gradient of t[m] is the sum over the slices k behind it of g[k] exp(t[m] - b[k]), with the gradient g of b.
    """

    @staticmethod
    def forward(ctx: Any, total: Tensor, shards: Shards, dim: int) -> Tensor:
        before = _combined_others(shards, total, -torch.inf, torch.logaddexp)
        ctx.shards, ctx.dim = shards, dim
        ctx.save_for_backward(total, before)
        return before

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        total, before = ctx.saved_tensors
        terms = torch.zeros_like(total)
        for gradient, other in _pairs_behind(ctx.shards, gradients[0], before, ctx.dim):
            terms = terms + torch.where(other == -torch.inf, 0.0, gradient * torch.exp(total - other))
        return terms, None, None


def _combined_others(
    shards: Shards, total: Tensor, empty: float, combine: Callable[[Tensor, Tensor], Tensor], *, before: bool = True
) -> Tensor:
    """The totals of all slices before this one, or of all after it, combined; `empty` where there are none."""
    combined = torch.full_like(total, empty)
    for number, other in _from_others(shards, total, 1):
        if (number <= shards.index) == before:  # else it comes from a slice at the other end
            combined = combine(combined, other)
    return combined


def _pairs_behind(shards: Shards, gradient: Tensor, other: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`gradient` and `other`, which travel together along `dim`, of the slices behind this one, the nearest first."""
    for number, pair in _from_others(shards, torch.cat([gradient, other], dim), -1):
        if shards.index + number < shards.count:
            first, second = pair.chunk(2, dim)
            yield first, second


def _from_others(shards: Shards, x: Tensor, step: int) -> Iterator[tuple[int, Tensor]]:
    """1, 2, ... and the `x` of the slice as many places before this one (`step` 1) or behind it (-1), round a ring."""
    traveling = x.contiguous()
    for number in range(1, shards.count):
        traveling = shards.start_passing(traveling, step).wait()
        yield number, traveling
