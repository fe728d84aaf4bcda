"""Placements, and `reshard`: the one list of collectives that a change of layout needs.

A **placement** says how one tensor is distributed on one mesh axis, forward *and* for its gradient:

=========  ====================================  =======================  ====================
text       forward value on each device          its gradient             who produces it
=========  ====================================  =======================  ====================
``R``      the whole tensor                      the whole gradient       redundant computation
``S(d)``   an equal slice of dim ``d``           the same slice           a kept factor
``S(d/n)`` a slice of each of dim ``d``'s n parts, the same                a factor in n parts
``P``      a term; the sum of all is the value   the whole gradient       a summed factor
``B``      the whole tensor                      a term of a sum          an operand that sharded work reads
=========  ====================================  =======================  ====================

``B`` ("broadcast") is what Megatron-LM's *f* operator reads: identity forward, all-reduce backward.  The
first three are DTensor's ``Replicate``, ``Shard`` and ``Partial``; ``B`` is ``Replicate`` with
``grad_placements=[Partial()]``.

A **layout** is a tuple of placements, one per mesh axis, outermost (farthest) first.  Two axes that shard the
same dim nest left to right, as in DTensor.  Slices are always equal: a dim is never split unevenly.

A dim may be several parts one behind the other, as the gate and the up projection of a feed-forward layer are in one
matrix.  Under ``S(1/2)`` a device has its slice of the first half of dim 1, and behind it that of the second.

`reshard` is the law "price what you emit": cost prices its steps, lower emits its steps, explain prints them.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autopar.errors import PlanFormatError

__all__ = [
    "BROADCAST",
    "LOCAL",
    "PARTIAL",
    "REPLICATE",
    "Axis",
    "Layout",
    "Placement",
    "Step",
    "format_layout",
    "local_shape",
    "mesh_axes",
    "parse_layout",
    "refine_layout",
    "refine_mesh",
    "reshard",
    "shard",
    "tidy",
]


class Placement(NamedTuple):
    """How a tensor is distributed on one mesh axis; see the module's table.

    `kind` is one of ``"R"``, ``"S"``, ``"P"``, ``"B"``; `dim` is the sharded tensor dim, -1 unless ``"S"``; `parts` is
    how many parts the dim has, of each of which a device has a slice.  A search hashes millions of layouts, and named
    tuples are hashed without running Python.
    """

    kind: str
    dim: int = -1
    parts: int = 1

    @property
    def is_shard(self) -> bool:
        """Whether each device holds only a slice."""
        return self.kind == "S"

    def __str__(self) -> str:
        """The text form, ``R``, ``S(0)``, ``S(1/2)``, ``P`` or ``B``."""
        if not self.is_shard:
            return self.kind
        return f"S({self.dim})" if self.parts == 1 else f"S({self.dim}/{self.parts})"


REPLICATE = Placement("R")
PARTIAL = Placement("P")
BROADCAST = Placement("B")

Layout = tuple[Placement, ...]


def shard(dim: int, parts: int = 1) -> Placement:
    """The placement that slices tensor dim `dim` (0-based, never negative), or each of so many `parts` of it."""
    return Placement("S", dim, parts)


def format_layout(layout: Layout) -> str:
    """``"S(0),R"``; the empty layout (a mesh without axes) is ``""``."""
    return ",".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    """The inverse of `format_layout`.

    Raises:
        PlanFormatError: a part of `text` is not one of ``R``, ``S(<dim>)``, ``S(<dim>/<parts>)``, ``P``, ``B``.
    """
    return tuple(_parse_placement(part) for part in text.split(",") if part)


def _parse_placement(text: str) -> Placement:
    match = re.fullmatch(r"\s*(?:([RPB])|S\(([0-9]{1,9})(?:/([1-9][0-9]{0,8}))?\))\s*", text)
    if match is None:
        raise PlanFormatError(f"placement {text!r:.40} is none of R, P, B, S(<dim>): write for instance 'S(0),R'")
    return Placement(match[1]) if match[1] else shard(int(match[2]), int(match[3] or 1))


class Axis(NamedTuple):
    """One mesh axis as the ranks it joins: `size` ranks, `stride` apart.

    Rank r has coordinate ``(r // stride) % size``; its group is r with that coordinate running.
    """

    size: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """Where global `rank` stands on this axis, 0 <= coordinate < size."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> tuple[int, ...]:
        """The global ranks that share this axis with `rank`, in coordinate order."""
        first = rank - self.coordinate(rank) * self.stride
        return tuple(range(first, first + self.size * self.stride, self.stride))


@lru_cache(maxsize=4096)
def mesh_axes(mesh: tuple[int, ...]) -> tuple[Axis, ...]:
    """The axes of a row-major mesh of these sizes; the last axis joins neighbours."""
    return tuple(Axis(size, math.prod(mesh[index + 1 :])) for index, size in enumerate(mesh))


def refine_mesh(*meshes: tuple[int, ...]) -> tuple[int, ...]:
    """The coarsest mesh that every one of `meshes` is a merging of.

    ``refine_mesh((4, 16), (8, 8)) == (4, 2, 8)``.  All must hold equally many devices and their strides must
    divide each other, which holds for all meshes that merge one chain of factors.

    Raises:
        ValueError: the meshes have no common refinement.
    """
    world = math.prod(meshes[0])
    strides = sorted({axis.stride for mesh in meshes for axis in mesh_axes(mesh)} | {world}, reverse=True)
    if any(math.prod(mesh) != world for mesh in meshes) or any(
        outer % inner for outer, inner in itertools.pairwise(strides)
    ):
        raise ValueError(f"meshes {meshes} have no common refinement")
    sizes = tuple(outer // inner for outer, inner in itertools.pairwise(strides))
    return sizes or (1,)


def refine_layout(layout: Layout, mesh: tuple[int, ...], refined: tuple[int, ...]) -> Layout:
    """`layout` on `mesh`, written for `refined`, a refinement of `mesh`."""
    axes = [axis for axis in mesh_axes(mesh) if axis.size > 1]
    placements = [p for p, size in zip(layout, mesh, strict=True) if size > 1]
    results: list[Placement] = []
    for fine in mesh_axes(refined):
        owner = [p for p, a in zip(placements, axes, strict=True) if a.stride <= fine.stride < a.stride * a.size]
        results.append(owner[0] if owner else REPLICATE)
    return tuple(results)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that one device holds of a tensor of global `shape`.

    Raises:
        ValueError: a sharded dim does not divide evenly.
    """
    sizes = list(shape)
    for placement, size in zip(layout, mesh, strict=True):
        if placement.is_shard:
            if sizes[placement.dim] % (size * placement.parts):
                raise ValueError(
                    f"dim {placement.dim} of shape {shape} does not divide by layout "
                    f"{format_layout(layout)} on mesh {mesh}"
                )
            sizes[placement.dim] //= size
    return tuple(sizes)


@dataclass(frozen=True)
class Step:
    """One movement on one axis: what runs forward, what runs backward on the gradient.

    `forward` and `backward` are one of

    * ``"none"``: nothing;
    * ``"slice"``: keep this device's slice of dim `dst.dim` (backward: of `src.dim`), or of each of its parts; local;
    * ``"pad"``: put the slice into zeros of the whole size; local;
    * ``"mask"``: device 0 of the axis keeps the value, the others hold zeros; local;
    * ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``: collectives.

    `fraction` is what one device holds, relative to the global tensor, on the *larger* side of the step (the
    gathered side of a gather or scatter; both sides are equal in an all-reduce or all-to-all).  So a
    collective of this step moves a buffer of ``global_bytes * fraction`` in the convention of the NCCL tests'
    "size".
    """

    axis: Axis
    src: Placement
    dst: Placement
    forward: str
    backward: str
    fraction: float


# (kind of src, kind of dst) -> (forward, backward).  The gradient goes from dst's gradient form
# to src's.
_MOVES = {
    ("R", "S"): ("slice", "all_gather"),
    ("R", "P"): ("mask", "none"),
    ("R", "B"): ("none", "all_reduce"),
    ("S", "R"): ("all_gather", "slice"),
    ("S", "S"): ("all_to_all", "all_to_all"),
    ("S", "P"): ("pad", "slice"),
    ("S", "B"): ("all_gather", "reduce_scatter"),
    ("P", "R"): ("all_reduce", "none"),
    ("P", "S"): ("reduce_scatter", "all_gather"),
    ("P", "B"): ("all_reduce", "all_reduce"),
    ("B", "R"): ("none", "mask"),
    ("B", "S"): ("slice", "pad"),
    ("B", "P"): ("mask", "mask"),
}


@lru_cache(maxsize=1 << 18)
def reshard(src: Layout, dst: Layout, mesh: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps that turn a tensor laid out as `src` into `dst`, both on `mesh`, in forward order.

    The backward pass runs their `backward` in reverse order.  Neighbouring axes that move alike move as one.
    For layouts on two meshes, `refine_mesh` and `refine_layout` first.

    >>> [step.forward for step in reshard((shard(0), shard(0)), (REPLICATE, shard(0)), (2, 4))]
    ['all_gather', 'all_gather', 'slice']
    """
    axes, pairs = _merge_axes(mesh, src, dst)
    now = [a for a, _ in pairs]
    want = [b for _, b in pairs]
    steps: list[Step] = []

    def move(index: int, target: Placement) -> None:
        if now[index] == target:
            return
        if now[index].is_shard and target.is_shard and now[index].dim == target.dim:
            move(index, REPLICATE)  # a device needs slices of several others: no collective has equal pieces of them
        forward, backward = _MOVES[now[index].kind, target.kind]
        rest = math.prod(a.size for i, a in enumerate(axes) if i != index and now[i].is_shard)
        own = axes[index].size if now[index].is_shard and target.is_shard else 1
        steps.append(Step(axes[index], now[index], target, forward, backward, 1 / (rest * own)))
        now[index] = target

    def dims_in_flux(indices: range) -> set[int]:
        return {p.dim for i in indices if now[i] != want[i] for p in (now[i], want[i]) if p.is_shard}

    # Inner axes first: a slice can only be joined (or cut) on an axis when no inner axis cuts the same dim.
    for index in reversed(range(len(axes))):
        in_flux = dims_in_flux(range(index))
        if now[index].is_shard and now[index].dim in in_flux:
            move(index, want[index] if want[index].kind in "RB" else REPLICATE)
        if not (want[index].is_shard and want[index].dim in in_flux):
            move(index, want[index])
    for index in range(len(axes)):
        move(index, want[index])
    return tuple(steps)


def _merge_axes(
    mesh: tuple[int, ...], src: Layout, dst: Layout
) -> tuple[list[Axis], list[tuple[Placement, Placement]]]:
    axes: list[Axis] = []
    pairs: list[tuple[Placement, Placement]] = []
    for axis, pair in zip(mesh_axes(mesh), zip(src, dst, strict=True), strict=True):
        if axis.size == 1:
            continue
        if pairs and pairs[-1] == pair:
            axes[-1] = Axis(axes[-1].size * axis.size, axis.stride)
        else:
            axes.append(axis)
            pairs.append(pair)
    return axes, pairs


def tidy(layout: Layout) -> Layout:
    """The layout in which a value that only the caller reads leaves: its own, but whole instead of
    terms.
    """
    return tuple(placement if placement.is_shard else REPLICATE for placement in layout)


# Movements inside one device.  They are priced at nothing: what they copy is small compared to what they save.
LOCAL = frozenset({"none", "slice", "pad", "mask"})
