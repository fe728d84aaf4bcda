"""Convolutions and pooling of images and videos that are split in space: neighbors exchange the rows at the borders.

A slice is extended by the rows that it needs from the previous and from the next slice, its halo
(`autopar.ops.halos`); the first and the last slice are extended by padding instead.  The op then runs on the extended
slice without padding in that dim.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from autopar.lower.autograd import call_function
from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.shards import Shards
from autopar.ops.halos import SPACE_DIMS, Halo, halo_of, nearer_shift, per_dim

__all__ = [
    "CONVOLUTIONS", "Numbers", "halo_convolution2", "halo_convolution3", "halo_convolution4", "halo_max_pool2",
    "halo_max_pool3", "halo_max_pool4", "halo_roll1", "halo_roll2", "halo_roll3", "numbers", "slice_halo", "with_halo",
]  # fmt: skip

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
Numbers = int | list[int] | tuple[int, ...]


def _halo_convolution(  # noqa: PLR0913  (its arguments)
    dim: int,
    shards: Shards,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """``conv1d``, ``conv2d`` or ``conv3d`` of this device's slice of `x` in dim `dim`.

    Communicates forward the halo of `x`, a send to each neighbor, and backward its gradient if `x` has one, on each
    axis of `shards`.  The gradients of `weight` and `bias` are terms (``B``).

    Args:
        dim: the dim of `x` that is split; at least 2.
        shards: of that dim.
        x: ``[batch, channels, ...]``, this device's equal slice.
        weight: whole in space.
        bias: per channel, or None.
        stride: as in torch, as are all others.
    """
    count = x.ndim - 2
    sizes = weight.shape[2:]
    strides, dilations = numbers(stride, count, 1), numbers(dilation, count, 1)
    if isinstance(padding, str):
        is_same = padding == "same"
        paddings = [is_same * d * (size - 1) // 2 for d, size in zip(dilations, sizes, strict=True)]
    else:
        paddings = numbers(padding, count, 0)
    place = dim - SPACE_DIMS[0]
    halo = slice_halo(shards, x.shape[dim], sizes[place], strides[place], paddings[place], dilations[place])
    paddings[place] = 0
    extended = with_halo(shards, x, dim, halo)
    return CONVOLUTIONS[count](extended, weight, bias, strides, paddings, dilations, groups)


def _halo_max_pool(
    dim: int,
    shards: Shards,
    x: Tensor,
    kernel_size: Numbers,
    stride: Numbers = (),
    padding: Numbers = 0,
    dilation: Numbers = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """``max_pool1d``, ``max_pool2d`` or ``max_pool3d`` of this device's slice of `x` in dim `dim`.

    Communicates as `_halo_convolution`.

    Args:
        dim: the dim of `x` that is split; at least 2.
        shards: of that dim.
        x: ``[batch, channels, ...]``, this device's equal slice.
        kernel_size: as in torch, as are all others.
        ceil_mode: False.
    """
    if ceil_mode:
        raise ValueError("windows that reach beyond the padding do not split")
    count, place = x.ndim - 2, dim - SPACE_DIMS[0]
    sizes = numbers(kernel_size, count, 0)
    strides = numbers(stride, count, 0) if stride else list(sizes)
    paddings, dilations = numbers(padding, count, 0), numbers(dilation, count, 1)
    halo = slice_halo(shards, x.shape[dim], sizes[place], strides[place], paddings[place], dilations[place])
    paddings[place] = 0
    extended = with_halo(shards, x, dim, halo, fill=-math.inf)
    return _MAX_POOLS[count](extended, sizes, strides, paddings, dilations)


def _halo_roll(dim: int, shards: Shards, x: Tensor, shifts: Numbers, dims: Numbers = ()) -> Tensor:
    """``roll`` of this device's slice of `x` in dim `dim`, which is one of `dims`.

    Communicates a send of the rows that leave the slice, and backward one of their gradients, on each axis of `shards`.

    Args:
        dim: the dim of `x` that is split.
        shards: of that dim.
        x: this device's equal slice.
        shifts: as in torch.
        dims: as in torch; distinct.
    """
    pairs = {each % x.ndim: shift for shift, each in zip(_tuple(shifts), _tuple(dims), strict=True)}
    shift = nearer_shift(pairs.pop(dim), x.shape[dim] * shards.count)
    if abs(shift) > x.shape[dim]:
        raise ValueError(f"slices of {x.shape[dim]} rows can't be rolled by {shift}")
    rolled = torch.roll(x, list(pairs.values()), list(pairs)) if pairs else x
    return call_function(_Roll, rolled, shards, dim, shift) if shift else rolled


class _Roll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, dim: int, shift: int) -> Tensor:
        ctx.shards, ctx.dim, ctx.shift = shards, dim, shift
        return _rolled(x, shards, dim, shift)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        return _rolled(gradients[0], ctx.shards, ctx.dim, -ctx.shift), None, None, None


def _rolled(x: Tensor, shards: Shards, dim: int, shift: int) -> Tensor:
    """This device's slice of what `x` is a slice of, rolled by `shift` rows; the ring is closed as a roll is."""
    stay = x.shape[dim] - abs(shift)
    if shift > 0:
        return torch.cat([_start(shards, x.narrow(dim, stay, shift), 1).wait(), x.narrow(dim, 0, stay)], dim)
    return torch.cat([x.narrow(dim, -shift, stay), _start(shards, x.narrow(dim, 0, -shift), -1).wait()], dim)


halo_convolution2, halo_convolution3, halo_convolution4 = (partial(_halo_convolution, dim) for dim in SPACE_DIMS)
halo_roll1, halo_roll2, halo_roll3 = (partial(_halo_roll, dim) for dim in (1, 2, 3))
halo_max_pool2, halo_max_pool3, halo_max_pool4 = (partial(_halo_max_pool, dim) for dim in SPACE_DIMS)


def _tuple(arg: Numbers) -> tuple[int, ...]:
    return (arg,) if isinstance(arg, int) else tuple(arg)


def numbers(arg: Numbers, count: int, default: int) -> list[int]:
    """An argument such as a stride as one number for each of `count` dims."""
    return list(per_dim(tuple(arg) if isinstance(arg, list) else arg, count, default))


def slice_halo(shards: Shards, rows: int, kernel: int, stride: int, padding: int, dilation: int) -> Halo:
    """The halo of slices of `rows` rows.

    Raises:
        ValueError: slices of the input and of the result don't match, or the halo is larger than a slice.
    """
    halo = halo_of(rows * shards.count, rows * shards.count // stride, kernel, stride, padding, dilation)
    if halo is None or rows // stride < halo.least_rows:
        raise ValueError(f"slices of {rows} rows can't run a kernel of {kernel} rows with stride {stride}")
    return halo


def with_halo(shards: Shards, x: Tensor, dim: int, halo: Halo, fill: float | str = 0.0) -> Tensor:
    """`x`, a slice in dim `dim`, with the last rows of the previous slice and the first rows of the next one.

    Before the first slice and after the last one there are rows of `fill`, or what ``torch.nn.functional.pad`` adds if
    it names a mode: "replicate", "reflect" or "circular".  Communicates a send to each neighbor that needs rows, and
    in backward, if `x` has a gradient, a send of their gradients back.
    """
    return x if halo.is_empty else call_function(_WithHalo, x, shards, dim, halo, fill)


class _WithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, dim: int, halo: Halo, fill: float | str) -> Tensor:
        ctx.shards, ctx.dim, ctx.halo, ctx.fill = shards, dim, halo, fill
        rows = x.shape[dim]
        coming = _start(shards, x.narrow(dim, rows - halo.before, halo.before), 1)
        following = _start(shards, x.narrow(dim, 0, halo.after), -1)
        before, after = coming.wait(), following.wait()
        if not shards.index and fill != "circular":  # else they come from the last slice
            before = _beyond_first(x, dim, halo.before, fill)
        if shards.index == shards.count - 1 and fill != "circular":
            after = _beyond_last(x, dim, halo.after, fill)
        return torch.cat([before, x, after], dim)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        shards: Shards = ctx.shards
        halo: Halo = ctx.halo
        dim, before, after, fill = int(ctx.dim), halo.before, halo.after, ctx.fill
        gradient = gradients[0]
        rows = gradient.shape[dim] - before - after
        first, last = gradient.narrow(dim, 0, before), gradient.narrow(dim, before + rows, after)
        returning, coming = _start(shards, first, -1), _start(shards, last, 1)
        own = gradient.narrow(dim, before, rows).clone()
        at_end, at_begin = returning.wait(), coming.wait()
        if before and (fill == "circular" or shards.index < shards.count - 1):
            own.narrow(dim, rows - before, before).add_(at_end)
        if after and (fill == "circular" or shards.index):
            own.narrow(dim, 0, after).add_(at_begin)
        if before and not shards.index:
            _add_first(own, dim, first, fill)
        if after and shards.index == shards.count - 1:
            _add_last(own, dim, last, fill)
        return own, None, None, None, None


def _beyond_first(x: Tensor, dim: int, count: int, fill: float | str) -> Tensor:
    """So many rows of padding before the first row of `x`."""
    if fill == "reflect":
        return x.narrow(dim, 1, count).flip(dim)
    row = x.narrow(dim, 0, 1).repeat_interleave(count, dim)
    return row if isinstance(fill, str) else torch.full_like(row, fill)


def _beyond_last(x: Tensor, dim: int, count: int, fill: float | str) -> Tensor:
    """So many rows of padding after the last row of `x`."""
    rows = x.shape[dim]
    if fill == "reflect":
        return x.narrow(dim, rows - 1 - count, count).flip(dim)
    row = x.narrow(dim, rows - 1, 1).repeat_interleave(count, dim)
    return row if isinstance(fill, str) else torch.full_like(row, fill)


def _add_first(own: Tensor, dim: int, gradient: Tensor, fill: float | str) -> None:
    """Add to the gradient of a first slice that of the padding before it."""
    if fill == "reflect":
        own.narrow(dim, 1, gradient.shape[dim]).add_(gradient.flip(dim))
    elif fill == "replicate":
        own.narrow(dim, 0, 1).add_(gradient.sum(dim, keepdim=True))


def _add_last(own: Tensor, dim: int, gradient: Tensor, fill: float | str) -> None:
    """Add to the gradient of a last slice that of the padding after it."""
    rows, count = own.shape[dim], gradient.shape[dim]
    if fill == "reflect":
        own.narrow(dim, rows - 1 - count, count).add_(gradient.flip(dim))
    elif fill == "replicate":
        own.narrow(dim, rows - 1, 1).add_(gradient.sum(dim, keepdim=True))


def _start(shards: Shards, rows: Tensor, step: int) -> Handle:
    """Start to send `rows` to the slice `step` places on, and to receive those of the slice as far before.

    They go round a ring, so that all devices send as much.  Nothing is sent if there are no rows.
    """
    return shards.start_passing(rows, step) if rows.numel() else Handle(lambda: rows)
