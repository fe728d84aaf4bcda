"""Pooling, resizing, padding and rearranging of images: batch and channels split, space does not."""

from __future__ import annotations

from autopar.ops.family import OpFamily, Types, argument, aten
from autopar.program import Op

__all__ = ["FAMILIES"]

_TABLE = {
    "max_pool1d avg_pool1d adaptive_avg_pool1d": "* _ -> * _",
    "max_pool2d avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d": "* _ _ -> * _ _",
    "max_pool3d avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d": "* _ _ _ -> * _ _ _",
    "adaptive_max_pool1d max_pool1d_with_indices": "* _ -> * _, * _",
    "adaptive_max_pool2d max_pool2d_with_indices": "* _ _ -> * _ _, * _ _",
    "adaptive_max_pool3d max_pool3d_with_indices": "* _ _ _ -> * _ _ _, * _ _ _",
    "upsample_nearest1d.vec upsample_linear1d.vec": "n c _ -> n c _",
    "upsample_nearest2d.vec upsample_bilinear2d.vec upsample_bicubic2d.vec": "n c _ _ -> n c _ _",
    "_upsample_nearest_exact2d.vec upsample_nearest2d": "n c _ _ -> n c _ _",
    "upsample_bilinear2d upsample_bicubic2d": "n c _ _ -> n c _ _",
    "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec": "n c _ _ -> n c _ _",
    "upsample_nearest3d.vec upsample_trilinear3d.vec": "n c _ _ _ -> n c _ _ _",
    "grid_sampler": "n c ..., n ... -> n c ...",
    "grid_sampler_2d": "n c _ _, n _ _ _ -> n c _ _",
    "pixel_shuffle pixel_unshuffle": "* c _ _ -> * c _ _",
    "channel_shuffle native_channel_shuffle": "n ... -> n ...",
    "im2col": "n c _ _ -> n c _",
    "col2im": "n c _ -> n c _ _",
    "flip": "*, @ -> * | plus 0",
    "roll": "*, #, @ -> * | plus 0",
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


FAMILIES = (OpFamily(aten(_TABLE)), OpFamily(aten({"pad constant_pad_nd": _pad}), fuses=True))
