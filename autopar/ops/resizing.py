"""Resizing of images and videos.  Batch and channels split; space splits where each row becomes a whole number of rows.

Row o of the result, of a size that is f times as large, lies at (o + 1/2) / f - 1/2 of the input: linear interpolation
reads the two rows around it, cubic interpolation the four, and beyond the edges the first or the last row again.  So a
slice needs one row of each neighbor, or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autopar.ops.family import Buffers, Kernel, OpFamily, Types, argument, aten
from autopar.ops.halos import SPACE_DIMS, Halo, halo_buffers, halo_kernels, space_names
from autopar.program import Arg, Op

__all__ = ["FAMILIES"]

_Factors = tuple[int | None, ...]


def _whole_factors(operand_types: Types, sizes: Arg, scales: Arg) -> _Factors:
    """Per spatial dim how many rows become of each row; None if that is no whole number."""
    shape = operand_types[0].shape[2:]
    if isinstance(sizes, tuple):
        scales = tuple(size / old for size, old in zip(sizes, shape, strict=True) if isinstance(size, int))
    if not isinstance(scales, tuple) or len(scales) != len(shape):
        return (None,) * len(shape)
    return tuple(
        int(scale) if isinstance(scale, int | float) and float(scale).is_integer() and size > 1 else None
        for scale, size in zip(scales, shape, strict=True)
    )


def _line(names: list[str], remarks: list[str]) -> str:
    dims = " ".join(["n", "c", *names])
    return f"{dims} -> {dims}" + (f" | {', '.join(remarks)}" if remarks else "")


def _nearest(op: Op, operand_types: Types, result_types: Types) -> str:
    """upsample_nearest(x, sizes, factors): where sizes are given, a kernel resizes to those of a slice."""
    sizes = argument(op, 1, "output_size")
    factors = _whole_factors(operand_types, sizes, argument(op, 2, "scale_factors"))
    names, _ = space_names([None if factor is None else _NO_HALO for factor in factors], "")
    named = [(dim, name) for dim, name in enumerate(names, SPACE_DIMS[0]) if name != "_"]
    return _line(names, [f"by {name} space_nearest{dim}" for dim, name in named if sizes is not None])


def _smooth_halos(op: Op, operand_types: Types, *, reach: int) -> tuple[Halo | None, ...]:
    """upsample_linear and the like (x, sizes, align_corners, factors); aligned corners don't match slices."""
    factors = _whole_factors(operand_types, argument(op, 1, "output_size"), argument(op, 3, "scale_factors"))
    is_aligned = argument(op, 2, "align_corners", False) is not False
    return tuple(None if factor is None or is_aligned else Halo(reach, reach, 1) for factor in factors)


def _smooth(op: Op, operand_types: Types, result_types: Types, *, reach: int, kernel: str) -> str:
    return _line(*space_names(_smooth_halos(op, operand_types, reach=reach), kernel))


def _smooth_buffers(
    op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool, *, reach: int
) -> Buffers:
    """Those of the halo, of which nothing is kept, and the result before the rows beyond the slice are dropped."""
    halo = halo_buffers(partial(_smooth_halos, reach=reach))(op, operands, results, trains, has_kernel)
    return replace(halo, forward=halo.forward + results[0].num_bytes, kept=0.0) if has_kernel else halo


def _smooth_family(names: str, reach: int, kernel: str) -> OpFamily:
    halos = partial(_smooth_halos, reach=reach)
    return OpFamily(
        aten({names: partial(_smooth, reach=reach, kernel=kernel)}),
        kernels=halo_kernels(kernel, halos),
        buffers=partial(_smooth_buffers, reach=reach),
    )


_NO_HALO = Halo(0, 0, 1)
_NEAREST = (
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec "
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec"
)

FAMILIES = (
    OpFamily(
        aten({_NEAREST: _nearest}),
        kernels={f"space_nearest{dim}": Kernel(is_in_space=True) for dim in SPACE_DIMS},
    ),
    _smooth_family("upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec", 1, "halo_linear"),
    _smooth_family("upsample_bicubic2d.vec", 2, "halo_cubic"),
)
