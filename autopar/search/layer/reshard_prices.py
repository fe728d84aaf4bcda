"""Prices of all reshards between some layouts at once.

Which steps a reshard takes depends on the layouts alone; the sizes of the axes and of the tensor only scale the bytes
that they move.  So the collectives of all pairs of layouts are counted once; for a mesh and a tensor each of them is
priced, and one matrix product gives the seconds of all pairs.  The counts come from `autopar.placement.reshard` itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.placement import LOCAL, Axis, Layout, mesh_axes, reshard, shard

__all__ = ["CollectiveCounts", "collective_counts", "reshard_tables"]

Array = npt.NDArray[np.float64]


_PRIMES = (2, 3, 5, 7, 11, 13)  # sizes of mesh axes, so that a size says which axes were merged


@dataclass(frozen=True)
class MergedCollective:
    """A collective of this kind on the merged axes `first` .. `last`, of a tensor that is sharded on the axes `cut`."""

    kind: str
    first: int
    last: int
    cut: tuple[int, ...]


@dataclass(frozen=True)
class CollectiveCounts:
    """How often each collective occurs in the reshard from layout i to layout j, forward and backward.

    The counts have one row per pair (i major).
    """

    num_layouts: int
    collectives: tuple[MergedCollective, ...]
    forward: Array
    backward: Array


def _rename_dims(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    """The same pair with dims numbered as they come: for the steps it only matters which dims are equal."""
    names: dict[int, int] = {}
    renamed = tuple(
        shard(names.setdefault(placement.dim, len(names)), placement.parts) if placement.is_shard else placement
        for placement in (*src, *dst)
    )
    return renamed[: len(src)], renamed[len(src) :]


@lru_cache(maxsize=1 << 16)
def _pair_collectives(src: Layout, dst: Layout) -> tuple[tuple[MergedCollective, ...], tuple[MergedCollective, ...]]:
    """The collectives of one reshard, forward and backward, on a mesh whose sizes are distinct primes."""
    mesh = _PRIMES[: len(src)]
    strides = [axis.stride for axis in mesh_axes(mesh)]
    forward: list[MergedCollective] = []
    backward: list[MergedCollective] = []
    for step in reshard(src, dst, mesh):
        last = strides.index(step.axis.stride)
        merged = [i for i in range(last + 1) if step.axis.size % mesh[i] == 0]
        pieces = round(1 / step.fraction)
        cut = tuple(i for i, prime in enumerate(mesh) if pieces % prime == 0)
        for kind, own in ((step.forward, forward), (step.backward, backward)):
            if kind not in LOCAL:
                own.append(MergedCollective(kind, merged[0], last, cut))
    return tuple(forward), tuple(backward)


@lru_cache(maxsize=1 << 16)
def _collectives_between(src: Layout, dst: Layout) -> tuple[tuple[MergedCollective, ...], tuple[MergedCollective, ...]]:
    return _pair_collectives(*_rename_dims(src, dst))


@lru_cache(maxsize=64)
def collective_counts(layouts: tuple[Layout, ...]) -> CollectiveCounts:
    """The collectives of all reshards between `layouts`, which are of one length: axes of one device are left out."""
    pairs = [_collectives_between(src, dst) for src in layouts for dst in layouts]
    number: dict[MergedCollective, int] = {}
    for each in itertools.chain.from_iterable(itertools.chain.from_iterable(pairs)):
        number.setdefault(each, len(number))
    counts = np.zeros((2, len(pairs), len(number)))
    for row, both in enumerate(pairs):
        for phase, collectives in enumerate(both):
            for each in collectives:
                counts[phase, row, number[each]] += 1
    return CollectiveCounts(len(layouts), tuple(number), *counts)


def reshard_tables(
    counts: CollectiveCounts,
    mesh: tuple[int, ...],
    num_bytes: float,
    collective_s: Callable[[str, Axis, float], float],
) -> tuple[Array, Array]:
    """Seconds of the reshard from layout i to layout j of a tensor of `num_bytes`: (forward, backward).

    `mesh` may hold axes of one device; the layouts that were counted are for the others.
    """
    sizes = tuple(size for size in mesh if size > 1)
    axes = mesh_axes(sizes)
    shape = (counts.num_layouts, counts.num_layouts)
    if not counts.collectives or num_bytes == 0:
        return np.zeros(shape), np.zeros(shape)
    price = np.array([
        collective_s(
            each.kind,
            Axis(math.prod(sizes[each.first : each.last + 1]), axes[each.last].stride),
            num_bytes / math.prod(sizes[axis] for axis in each.cut),
        )
        for each in counts.collectives
    ])  # fmt: skip
    return (counts.forward @ price).reshape(shape), (counts.backward @ price).reshape(shape)
