"""Where parameters lie between steps: ZeRO and HSDP as layouts."""

from __future__ import annotations

from functools import lru_cache

from autopar.placement import REPLICATE, Layout, Placement, shard
from autopar.program import TensorType

__all__ = ["storage_layout"]


@lru_cache(maxsize=1 << 16)
def storage_layout(copy: Layout, tensor: TensorType, mesh: tuple[int, ...], shard_axes: tuple[int, ...] = ()) -> Layout:
    """The layout in which a parameter is stored that compute reads as `copy`.

    Where compute reads a slice, that slice is stored.  On those of `shard_axes` (indices of mesh axes) where
    compute reads the whole, storage is sliced on one dim: one that compute does not slice, or slices only on
    axes outside all storage axes (an outer axis can't be gathered while an inner one cuts the same dim), and
    that divides.  The dim that serves most devices wins, the first of equals; where none serves, the
    parameter stays whole.

    Args:
        copy: the layout that the layer's copy has.
        tensor: the parameter's global type.
        mesh: sizes of the mesh axes.
        shard_axes: empty for ZeRO-0; all axes for ZeRO-1..3; some for HSDP.
    """
    free = [axis for axis in shard_axes if not copy[axis].is_shard and mesh[axis] > 1]
    stored: list[Placement] = [p if p.is_shard else REPLICATE for p in copy]
    best: tuple[int, dict[int, Placement]] = (1, {})
    for dim in range(len(tensor.shape)):
        degree, axes = _serve(dim, free, copy, tensor, mesh)
        if degree > best[0]:
            best = (degree, {axis: shard(dim) for axis in axes})
    return tuple(best[1].get(axis, placement) for axis, placement in enumerate(stored))


def _serve(dim: int, free: list[int], copy: Layout, tensor: TensorType, mesh: tuple[int, ...]) -> tuple[int, list[int]]:
    """On which of the `free` axes dim `dim` can be stored in slices, and into how many."""
    cut_by_compute = [axis for axis, placement in enumerate(copy) if placement == shard(dim)]
    size = tensor.shape[dim]
    for axis in cut_by_compute:
        size //= mesh[axis]
    degree, axes = 1, list[int]()
    for axis in sorted(free):
        if axis > max(cut_by_compute, default=-1) and size % (degree * mesh[axis]) == 0:
            degree *= mesh[axis]
            axes.append(axis)
    return degree, axes
