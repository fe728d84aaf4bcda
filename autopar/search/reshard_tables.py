"""Prices of all reshards between some layouts at once.

Which steps a reshard takes depends on the layouts alone; the sizes of the axes and of the tensor only scale
the bytes that they move.  So the steps of all pairs of layouts are listed once, as counts of *moves*; for a
mesh and a tensor the moves are priced, and one matrix product gives the table.  The list comes from
`autopar.placement.reshard` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autopar.placement import LOCAL, Axis, Layout, Placement, mesh_axes, reshard, shard

__all__ = ["MoveTable", "move_table", "reshard_tables"]

Array = npt.NDArray[np.float64]


_PRIMES = (2, 3, 5, 7, 11, 13)


@dataclass(frozen=True)
class Move:
    """A collective of this kind on the merged axes `first` .. `last`, of a tensor that the axes `cut` have
    cut.
    """

    kind: str
    first: int
    last: int
    cut: tuple[int, ...]


@dataclass(frozen=True)
class MoveTable:
    """How often each move occurs in the reshard from layout i to layout j, forward and backward.

    The counts have one row per pair (i major).
    """

    num_layouts: int
    moves: tuple[Move, ...]
    forward: Array
    backward: Array


def _rename_dims(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    """The same pair with dims numbered as they come: for the steps it only matters which dims are equal."""
    names: dict[int, Placement] = {}
    renamed = tuple(
        names.setdefault(placement.dim, shard(len(names))) if placement.is_shard else placement
        for placement in (*src, *dst)
    )
    return renamed[: len(src)], renamed[len(src) :]


@lru_cache(maxsize=1 << 16)
def _pair_moves(src: Layout, dst: Layout) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    """The collectives of one reshard, forward and backward, on a mesh whose sizes are distinct primes."""
    mesh = _PRIMES[: len(src)]
    strides = [axis.stride for axis in mesh_axes(mesh)]
    forward: list[Move] = []
    backward: list[Move] = []
    for step in reshard(src, dst, mesh):
        last = strides.index(step.axis.stride)
        merged = [i for i in range(last + 1) if step.axis.size % mesh[i] == 0]
        pieces = round(1 / step.fraction)
        cut = tuple(i for i, prime in enumerate(mesh) if pieces % prime == 0)
        for kind, found in ((step.forward, forward), (step.backward, backward)):
            if kind not in LOCAL:
                found.append(Move(kind, merged[0], last, cut))
    return tuple(forward), tuple(backward)


@lru_cache(maxsize=1 << 16)
def _moves_between(src: Layout, dst: Layout) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
    return _pair_moves(*_rename_dims(src, dst))


@lru_cache(maxsize=64)
def move_table(layouts: tuple[Layout, ...]) -> MoveTable:
    """The moves of all reshards between `layouts`, which are of one length: axes of one device are left
    out.
    """
    pairs = [_moves_between(src, dst) for src in layouts for dst in layouts]
    moves: dict[Move, int] = {}
    for both in pairs:
        for move in (*both[0], *both[1]):
            moves.setdefault(move, len(moves))
    forward, backward = np.zeros((2, len(pairs), len(moves)))
    for row, (ahead, back) in enumerate(pairs):
        for move in ahead:
            forward[row, moves[move]] += 1
        for move in back:
            backward[row, moves[move]] += 1
    return MoveTable(len(layouts), tuple(moves), forward, backward)


def reshard_tables(
    table: MoveTable,
    mesh: tuple[int, ...],
    num_bytes: float,
    collective_s: Callable[[str, Axis, float], float],
) -> tuple[Array, Array]:
    """Seconds of the reshard from layout i to layout j of a tensor of `num_bytes`: (forward, backward).

    `mesh` may hold axes of one device; the table's layouts are for the others.
    """
    sizes = tuple(size for size in mesh if size > 1)
    axes = mesh_axes(sizes)
    shape = (table.num_layouts, table.num_layouts)
    if not table.moves or num_bytes == 0:
        return np.zeros(shape), np.zeros(shape)
    price = np.array([
        collective_s(
            move.kind,
            Axis(math.prod(sizes[move.first : move.last + 1]), axes[move.last].stride),
            num_bytes / math.prod(sizes[axis] for axis in move.cut),
        )
        for move in table.moves
    ])  # fmt: skip
    return (table.forward @ price).reshape(shape), (table.backward @ price).reshape(shape)
