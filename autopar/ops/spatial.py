"""Pooling, padding and rearranging of images, and resizing that does not split in space.

Batch and channels split; space splits in pooling, rolls and pixel shuffles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.ops.family import Buffers, Kernel, OpFamily, Rule, Types, argument, aten
from autopar.ops.halos import (
    Halo,
    halo_buffers,
    halo_kernels,
    halo_of,
    nearer_shift,
    per_dim,
    space_factor,
    space_names,
)
from autopar.ops.views import dim_names, text_of
from autopar.program import KernelCollective, Op

__all__ = ["FAMILIES"]

_MAX_POOLS = "max_pool1d max_pool2d max_pool3d"


def _num_pooled(op: Op) -> int:
    """The number of dims that a pooling op pools."""
    return next(n for n in (1, 2, 3) if f"pool{n}d" in op.target)


def _pool_halos(op: Op, operand_types: Types) -> tuple[Halo | None, ...]:
    """The halo of each dim of ``max_pool``: (x, kernel, stride, padding, dilation, ceil_mode)."""
    count, shape = _num_pooled(op), operand_types[0].shape
    kernel = per_dim(argument(op, 1, "kernel_size"), count, 0)
    strides = per_dim(argument(op, 2, "stride", ()), count, 0)
    paddings, dilations = (per_dim(argument(op, at, key, old), count, old) for at, key, old in _POOL_DEFAULTS)
    if len(shape) != count + 2 or argument(op, 5, "ceil_mode", False):
        return (None,) * count
    strides = strides if any(strides) else kernel
    spans = [dilation * (size - 1) for size, dilation in zip(kernel, dilations, strict=True)]
    ends = [(n + 2 * p - span - 1) // s + 1 for n, p, span, s in zip(shape[2:], paddings, spans, strides, strict=True)]
    return tuple(map(halo_of, shape[2:], ends, kernel, strides, paddings, dilations))


def _max_pool(op: Op, operand_types: Types, result_types: Types) -> str:
    names, remarks = space_names(_pool_halos(op, operand_types), "halo_max_pool")
    return _pool_line(operand_types, names, remarks)


def _avg_pool(op: Op, operand_types: Types, result_types: Types) -> str:
    """avg_pool(x, kernel, stride, padding, ceil_mode, ...): space splits where windows don't overlap."""
    count, shape = _num_pooled(op), operand_types[0].shape
    kernel = per_dim(argument(op, 1, "kernel_size"), count, 0)
    strides = per_dim(argument(op, 2, "stride", ()), count, 0)
    is_tiled = (strides == kernel or not any(strides)) and not any(per_dim(argument(op, 3, "padding", 0), count, 0))
    halos = [
        halo_of(n, n // k, k, k, 0) if is_tiled and len(shape) == count + 2 else None
        for n, k in zip(shape[-count:], kernel, strict=True)
    ]
    return _pool_line(operand_types, *space_names(halos, ""))


def _pool_line(operand_types: Types, names: list[str], remarks: list[str]) -> str:
    dims = " ".join(["*", *names] if len(operand_types[0].shape) != len(names) + 2 else ["n", "c", *names])
    return f"{dims} -> {dims}" + (f" | {', '.join(remarks)}" if remarks else "")


def _shuffled(op: Op, operand_types: Types, result_types: Types) -> str:
    """pixel_shuffle, pixel_unshuffle: a row becomes several rows, or several rows become one."""
    if len(operand_types[0].shape) != 4:
        return "* c _ _ -> * c _ _"
    dims = f"n c {space_factor(2)} {space_factor(3)}"
    return f"{dims} -> {dims}"


def _roll(op: Op, operand_types: Types, result_types: Types) -> str:
    """roll(x, shifts, dims): rolled dims stay whole, or split by a kernel in images ``[batch, ..., channels]``."""
    shifts, shape = _shifts(op, operand_types), operand_types[0].shape
    if not shifts or len(shape) < len(_ROLLED_DIMS) + 1 or not operand_types[0].is_floating:
        return "*, #, @ -> * | plus 0"
    dims = [dim for dim in shifts if dim in _ROLLED_DIMS and dim < len(shape) - 1]
    names = dim_names(len(shape), *(dim for dim in shifts if dim not in dims))
    remarks = ["plus 0", *(f"by {names[dim]} halo_roll{dim}" for dim in dims)]
    return f"{text_of(names)} -> {text_of(names)} | {', '.join(remarks)}"


def _shifts(op: Op, operand_types: Types) -> dict[int, int]:
    """By how many rows each dim is rolled, in the direction in which it is fewer; {} if x is rolled as one row."""
    shape = operand_types[0].shape
    numbers = [argument(op, at, key, ()) for at, key in ((1, "shifts"), (2, "dims"))]
    shifts, dims = (
        [n for n in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(n, int)] for arg in numbers
    )  # fmt: skip
    if len(shifts) != len(dims) or not all(shape) or len({dim % len(shape) for dim in dims}) != len(dims):
        return {}
    return {
        dim % len(shape): nearer_shift(shift, shape[dim]) for shift, dim in zip(shifts, dims, strict=True)
    }  # fmt: skip


def _roll_kernel(dim: int) -> Kernel:
    """Rows that leave a slice are sent to the next one, or to the one before, and their gradients come back."""

    def sends(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
        rows, dtype = abs(_shifts(op, operands).get(dim, 0)), operands[0].dtype
        forward = KernelCollective("send", "forward", 0, (dim,), dtype, rows)
        return (forward, replace(forward, phase="backward", is_of_gradient=True)) if rows else ()

    def least(op: Op, operands: Types) -> int:
        return abs(_shifts(op, operands).get(dim, 0))

    return Kernel(sends, least=least, is_in_space=True)


def _roll_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Dims are rolled one after the other, and all but the last result are there until it is made (at::roll)."""
    shifts = argument(op, 1, "shifts")
    between = 0 if has_kernel or not isinstance(shifts, tuple) else max(0, len(shifts) - 1)
    return Buffers(forward=float(between * operands[0].num_bytes), backward=float(between * operands[0].num_bytes))


_ROLLED_DIMS = (1, 2, 3)
_POOL_DEFAULTS = ((3, "padding", 0), (4, "dilation", 1))
_TABLE: Mapping[str, Rule | None] = {
    "avg_pool1d avg_pool2d avg_pool3d": _avg_pool,
    "adaptive_avg_pool1d": "* _ -> * _",
    "adaptive_avg_pool2d _adaptive_avg_pool2d": "* _ _ -> * _ _",
    "adaptive_avg_pool3d _adaptive_avg_pool3d": "* _ _ _ -> * _ _ _",
    "adaptive_max_pool1d max_pool1d_with_indices": "* _ -> * _, * _",
    "adaptive_max_pool2d max_pool2d_with_indices": "* _ _ -> * _ _, * _ _",
    "adaptive_max_pool3d max_pool3d_with_indices": "* _ _ _ -> * _ _ _, * _ _ _",
    "upsample_nearest2d": "n c _ _ -> n c _ _",
    "upsample_bilinear2d upsample_bicubic2d": "n c _ _ -> n c _ _",
    "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec": "n c _ _ -> n c _ _",
    "grid_sampler": "n c ..., n ... -> n c ...",
    "grid_sampler_2d": "n c _ _, n _ _ _ -> n c _ _",
    "pixel_shuffle pixel_unshuffle": _shuffled,
    "channel_shuffle native_channel_shuffle": "n ... -> n ...",
    "im2col": "n c _ _ -> n c _",
    "col2im": "n c _ -> n c _ _",
    "flip": "*, @ -> * | plus 0",
    "tril triu": "* _ _ -> * _ _ | plus 0",
}


def _pad(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """pad(x, widths, mode): widths are pairs, beginning with the last dim; padded dims stay whole."""
    widths = argument(op, 1, "pad")
    if not isinstance(widths, tuple):
        return None
    rank, num_dims = len(operand_types[0].shape), len(widths) // 2
    padded = {rank - 1 - index // 2 for index, width in enumerate(widths) if width != 0}
    # Modes other than constant need a batch dim and a rank that fits the number of widths; slices keep both.
    dims = " ".join("_" if dim in padded else f"d{dim}" for dim in range(rank)) or "()"
    return f"{dims} -> {dims}" if num_dims <= rank else None


FAMILIES = (
    OpFamily(
        aten({_MAX_POOLS: _max_pool}),
        kernels=halo_kernels("halo_max_pool", _pool_halos),
        buffers=halo_buffers(_pool_halos),
    ),
    OpFamily(
        aten({"roll": _roll}),
        kernels={f"halo_roll{dim}": _roll_kernel(dim) for dim in _ROLLED_DIMS},
        buffers=_roll_buffers,
    ),
    OpFamily(aten(_TABLE)),
    OpFamily(aten({"pad constant_pad_nd": _pad}), fuses=True),
)
