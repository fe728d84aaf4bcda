"""Convolutions of a padded input: whole, and split in space.

A slice is extended by the rows that it needs from its neighbors, and at the edges by rows of padding; all other dims
are padded as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.nn import functional

from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.halos import CONVOLUTIONS, slice_halo, with_halo
from autopar.ops.halos import SPACE_DIMS

__all__ = [
    "halo_padded_convolution2", "halo_padded_convolution3", "halo_padded_convolution4", "padded_convolution",
]  # fmt: skip


def padded_convolution(  # noqa: PLR0913  (those of a convolution and of a pad)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    widths: Sequence[int],
    mode: str,
    value: float | None,
) -> Tensor:
    """``conv1d``, ``conv2d`` or ``conv3d`` of ``pad(x, widths, mode, value)``."""
    padded = functional.pad(x, list(widths), mode, value) if any(widths) else x
    return CONVOLUTIONS[x.ndim - 2](padded, weight, bias, list(stride), list(padding), list(dilation), groups)


def _halo_padded_convolution(  # noqa: PLR0913
    dim: int,
    shards: Shards,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    widths: Sequence[int],
    mode: str,
    value: float | None,
) -> Tensor:
    """`padded_convolution` of this device's slice of `x` in dim `dim`.

    Communicates as a convolution without padding before it, and has its arguments (`autopar.lower.kernels.halos`);
    `widths`, `mode` and `value` are those of padding the whole `x`.
    """
    place, at = dim - SPACE_DIMS[0], 2 * (x.ndim - 1 - dim)
    own, paddings, left = widths[at : at + 2], list(padding), list(widths)
    fill = 0.0 if not any(own) else (value or 0.0) if mode == "constant" else mode
    before = own[0] + paddings[place]
    halo = slice_halo(shards, x.shape[dim], weight.shape[dim], stride[place], before, dilation[place])
    paddings[place], left[at : at + 2] = 0, [0, 0]
    extended = with_halo(shards, x, dim, halo, fill)
    return padded_convolution(extended, weight, bias, stride, paddings, dilation, groups, left, mode, value)


halo_padded_convolution2, halo_padded_convolution3, halo_padded_convolution4 = (
    partial(_halo_padded_convolution, dim) for dim in SPACE_DIMS
)
