"""Transposed convolutions and resizing of images and videos that are split in space.

A slice is extended by the rows that its part of the result needs from the slices next to it; of what it becomes, the
rows that belong to those slices are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.nn import functional

from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.halos import Numbers, numbers, with_halo
from autopar.ops.halos import SPACE_DIMS, Halo, transposed_halo_of

__all__ = [
    "halo_cubic2", "halo_cubic3", "halo_cubic4", "halo_linear2", "halo_linear3", "halo_linear4",
    "halo_transposed_convolution2", "halo_transposed_convolution3", "halo_transposed_convolution4", "space_nearest2",
    "space_nearest3", "space_nearest4",
]  # fmt: skip

_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def _halo_transposed_convolution(  # noqa: PLR0913  (its arguments)
    dim: int,
    shards: Shards,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers = 0,
    output_padding: Numbers = 0,
    groups: int = 1,
    dilation: Numbers = 1,
) -> Tensor:
    """``conv_transpose1d``, ``conv_transpose2d`` or ``conv_transpose3d`` of this device's slice of `x` in dim `dim`.

    Communicates as a convolution and has its arguments (`autopar.lower.kernels.halos`), and `output_padding`.
    """
    count, place, rows = x.ndim - 2, dim - SPACE_DIMS[0], x.shape[dim]
    strides, dilations = numbers(stride, count, 1), numbers(dilation, count, 1)
    paddings, added = numbers(padding, count, 0), numbers(output_padding, count, 0)
    step, dropped = strides[place], paddings[place]
    whole = rows * shards.count
    kernel = weight.shape[dim]
    halo = transposed_halo_of(whole, whole * step, kernel, step, dropped, dilations[place])
    _check(shards, halo, rows)
    assert halo is not None
    paddings[place] = 0  # the rows that it drops at the edges are beyond the slice
    extended = with_halo(shards, x, dim, halo)
    made = _TRANSPOSED[count](extended, weight, bias, strides, paddings, added, groups, dilations)
    return made.narrow(dim, dropped + halo.before * step, rows * step).contiguous()


halo_transposed_convolution2, halo_transposed_convolution3, halo_transposed_convolution4 = (
    partial(_halo_transposed_convolution, dim) for dim in SPACE_DIMS
)


def _space_nearest(
    dim: int, shards: Shards, x: Tensor, output_size: Sequence[int], scale_factors: Sequence[float] | None = None
) -> Tensor:
    """Resizing to the nearest of this device's slice of `x` in dim `dim`; communicates nothing.

    Args:
        dim: the dim of `x` that is split; at least 2.
        shards: of that dim.
        x: ``[batch, channels, ...]``, this device's equal slice.
        output_size: of the whole result; that of `dim` is a multiple of the input's.
        scale_factors: None.
    """
    if scale_factors is not None:
        raise ValueError("slices are resized to sizes, or by factors")
    sizes = list(output_size)
    sizes[dim - SPACE_DIMS[0]] //= shards.count
    return functional.interpolate(x, sizes, mode="nearest")


space_nearest2, space_nearest3, space_nearest4 = (partial(_space_nearest, dim) for dim in SPACE_DIMS)


def _halo_resize(
    dim: int,
    modes: Mapping[int, str],
    reach: int,
    shards: Shards,
    x: Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Tensor:
    """Linear or cubic interpolation of this device's slice of `x` in dim `dim`, by a whole factor.

    Communicates forward `reach` rows of `x`, a send to each neighbor, and backward their gradients if `x` has one, on
    each axis of `shards`.

    Args:
        dim: the dim of `x` that is split; at least 2.
        modes: of ``torch.nn.functional.interpolate``, by the number of spatial dims.
        reach: rows of each neighbor that are read.
        shards: of that dim.
        x: ``[batch, channels, ...]``, this device's equal slice.
        output_size: of the whole result, or None.
        align_corners: False.
        scale_factors: of all spatial dims, where there is no `output_size`.
    """
    place, rows, halo = dim - SPACE_DIMS[0], x.shape[dim], Halo(reach, reach, 1)
    _check(shards, halo, rows)
    extended = with_halo(shards, x, dim, halo, "replicate")
    mode = modes[x.ndim - 2]
    if output_size is None:
        assert scale_factors is not None
        factor = int(scale_factors[place])
        made = functional.interpolate(extended, None, list(scale_factors), mode, align_corners)
    else:
        factor, sizes = output_size[place] // (rows * shards.count), list(output_size)
        sizes[place] = factor * (rows + 2 * reach)
        made = functional.interpolate(extended, sizes, None, mode, align_corners)
    return made.narrow(dim, factor * reach, factor * rows).contiguous()


_LINEAR, _CUBIC = {1: "linear", 2: "bilinear", 3: "trilinear"}, {2: "bicubic"}
halo_linear2, halo_linear3, halo_linear4 = (partial(_halo_resize, dim, _LINEAR, 1) for dim in SPACE_DIMS)
halo_cubic2, halo_cubic3, halo_cubic4 = (partial(_halo_resize, dim, _CUBIC, 2) for dim in SPACE_DIMS)


def _check(shards: Shards, halo: Halo | None, rows: int) -> None:
    if halo is None or rows < halo.least_rows:
        raise ValueError(f"slices of {rows} rows can't be resized with a halo of {halo}")
