"""Overlapping windows of a tensor, whatever its order in memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["as_strided"]


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """``torch.as_strided`` of `x` as if it lay in row-major order in memory, which parts on devices need not.

    Args:
        x: any tensor.
        size: the shape of the result.
        stride: the distance of entries of the result along each dim, in entries of `x`.
        offset: of the first entry of the result.
    """
    rows = x.contiguous()
    return rows.as_strided(tuple(size), tuple(stride), rows.storage_offset() + offset)
