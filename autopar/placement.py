"""Placements, and `reshard`: the one list of collectives that a change of layout needs.

A **placement** says how a tensor *and* its gradient are distributed on one mesh axis:

=========  ====================================  =======================  ====================
text       forward value on each device          its gradient             produced by
=========  ====================================  =======================  ====================
``R``      the whole tensor                      the whole gradient       redundant computation
``S(d)``   an equal slice of dim ``d``           the same slice           a kept factor
``S(d/n)`` a slice of each of dim ``d``'s n parts, the same                a factor in n parts
``P``      a term; the sum of all is the value   the whole gradient       a summed factor
``B``      the whole tensor                      a term of a sum          an operand that sharded work reads
=========  ====================================  =======================  ====================

``B`` ("broadcast") is the input of Megatron-LM's *f* operator: identity in forward, all-reduce in backward.  ``R``,
``S`` and ``P`` are DTensor's ``Replicate``, ``Shard`` and ``Partial``; ``B`` is ``Replicate`` with
``grad_placements=[Partial()]``.

A **layout** is a tuple of placements, one per mesh axis, outermost (farthest) first.  Two axes that shard the
same dim nest left to right, as in DTensor.  Slices are always equal: a dim is never split unevenly.

A dim may consist of several consecutive parts: for example, the gate and the up projection of a feed-forward layer may
be in one matrix.  Under ``S(1/2)`` a device has its slice of the first half of dim 1, followed by its slice of the
second half.

`reshard` enforces the law "price what you emit": cost prices its steps, lower emits them, explain prints them.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from enum import Flag, auto
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
    "Links",
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
    "sharded_axes",
    "tidy",
]


class Placement(NamedTuple):
    """How a tensor is distributed on one mesh axis; see the table in the module's docstring.

    `kind` is one of ``"R"``, ``"S"``, ``"P"``, ``"B"``; `dim` is the sharded tensor dim, -1 unless ``"S"``; `parts` is
    the number of parts of the dim, of each of which a device has a slice.  It is a named tuple because a search hashes
    millions of layouts, and named tuples are hashed without running Python code.
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
    """The placement that slices tensor dim `dim` (0-based, never negative), or each of its `parts`."""
    return Placement("S", dim, parts)


def format_layout(layout: Layout) -> str:
    """Format a layout as ``"S(0),R"``; the empty layout (of a mesh without axes) is ``""``."""
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


class Links(Flag):
    """Links of a cluster: those inside nodes, and those between them."""

    NODE = auto()
    NETWORK = auto()


class Axis(NamedTuple):
    """One mesh axis as the ranks it joins: `size` ranks, `stride` apart.

    Rank r has coordinate ``(r // stride) % size``; its group has all ranks that differ from r in that coordinate only.
    """

    size: int
    stride: int

    def coordinate(self, rank: int) -> int:
        """The coordinate of global `rank` on this axis, 0 <= coordinate < size."""
        return rank // self.stride % self.size

    def group(self, rank: int) -> tuple[int, ...]:
        """The global ranks that share this axis with `rank`, in coordinate order."""
        first = rank - self.coordinate(rank) * self.stride
        return tuple(range(first, first + self.size * self.stride, self.stride))

    def by_node(self, devices_per_node: int) -> tuple[int, int]:
        """How many ranks of a group share a node, and how many nodes a group has."""
        per_node = min(self.size, max(1, devices_per_node // self.stride))
        return per_node, math.ceil(self.size / per_node)

    def links(self, devices_per_node: int) -> Links:
        """The links that a collective on this axis keeps busy."""
        per_node, num_nodes = self.by_node(devices_per_node)
        return (Links.NODE if per_node > 1 else Links(0)) | (Links.NETWORK if num_nodes > 1 else Links(0))


@lru_cache(maxsize=4096)
def mesh_axes(mesh: tuple[int, ...]) -> tuple[Axis, ...]:
    """The axes of a row-major mesh of these sizes; the last axis joins consecutive ranks."""
    return tuple(Axis(size, math.prod(mesh[index + 1 :])) for index, size in enumerate(mesh))


def sharded_axes(layout: Layout, mesh: tuple[int, ...]) -> tuple[Axis, ...]:
    """The axes of `mesh` on which devices have different slices of a tensor in this layout."""
    axes = zip(mesh_axes(mesh), layout, strict=True)
    return tuple(axis for axis, placement in axes if placement.is_shard and axis.size > 1)


def refine_mesh(*meshes: tuple[int, ...]) -> tuple[int, ...]:
    """The coarsest mesh from which each of `meshes` results by merging axes.

    ``refine_mesh((4, 16), (8, 8)) == (4, 2, 8)``.  All must have the same number of devices, and their strides must
    divide each other, which is true for all meshes that merge one chain of factors.

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
    """The layout on `refined`, a refinement of `mesh`, that equals `layout` on `mesh`."""
    axes = [axis for axis in mesh_axes(mesh) if axis.size > 1]
    placements = [p for p, size in zip(layout, mesh, strict=True) if size > 1]
    results: list[Placement] = []
    for fine in mesh_axes(refined):
        owner = [p for p, a in zip(placements, axes, strict=True) if a.stride <= fine.stride < a.stride * a.size]
        results.append(owner[0] if owner else REPLICATE)
    return tuple(results)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The local shape on one device of a tensor with global `shape`.

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
    """One change of a placement on one axis: what runs in forward, and what runs on the gradient in backward.

    `forward` and `backward` are one of

    * ``"none"``: nothing;
    * ``"slice"``: keep this device's slice of dim `dst.dim` (backward: of `src.dim`), or of each of its parts; local;
    * ``"pad"``: put the slice into zeros of the whole size; local;
    * ``"mask"``: device 0 of the axis keeps the value, the others have zeros; local;
    * ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"``: collectives.

    `fraction` is the size of the local tensor relative to the global one, on the *larger* side of the step (the
    gathered side of a gather or scatter; both sides are equal in an all-reduce or all-to-all).  So the buffer of a
    collective has ``global_bytes * fraction``, in the convention of the NCCL tests' "size".
    """

    axis: Axis
    src: Placement
    dst: Placement
    forward: str
    backward: str
    fraction: float


# (kind of src, kind of dst) -> (forward, backward).  Backward converts the gradient of dst to that of src.
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
    """The steps that convert a tensor from layout `src` to `dst`, both on `mesh`, in forward order.

    The backward pass runs their `backward` in reverse order.  Consecutive axes with equal changes are merged.
    For layouts on different meshes, call `refine_mesh` and `refine_layout` first.

    >>> [step.forward for step in reshard((shard(0), shard(0)), (REPLICATE, shard(0)), (2, 4))]
    ['all_gather', 'all_gather', 'slice']
    """
    axes, pairs = _merge_axes(mesh, src, dst)
    current = [before for before, _ in pairs]
    final = [after for _, after in pairs]
    steps: list[Step] = []

    def move(index: int, target: Placement) -> None:
        if current[index] == target:
            return
        if current[index].is_shard and target.is_shard and current[index].dim == target.dim:
            move(index, REPLICATE)  # a device needs unequal pieces of several others' slices: no collective does that
        forward, backward = _MOVES[current[index].kind, target.kind]
        num_slices = math.prod(axis.size for i, axis in enumerate(axes) if i != index and current[i].is_shard)
        if current[index].is_shard and target.is_shard:
            num_slices *= axes[index].size
        steps.append(Step(axes[index], current[index], target, forward, backward, 1 / num_slices))
        current[index] = target

    def changing_dims(indices: range) -> set[int]:
        return {p.dim for i in indices if current[i] != final[i] for p in (current[i], final[i]) if p.is_shard}

    # Inner axes first: a slice can be joined or split on an axis only if no inner axis shards the same dim.
    for index in reversed(range(len(axes))):
        changing = changing_dims(range(index))
        if current[index].is_shard and current[index].dim in changing:
            move(index, final[index] if final[index].kind in "RB" else REPLICATE)
        if not (final[index].is_shard and final[index].dim in changing):
            move(index, final[index])
    for index in range(len(axes)):
        move(index, final[index])
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
    """The layout in which a value that only the caller reads is returned: `layout`, but whole instead of terms."""
    return tuple(placement if placement.is_shard else REPLICATE for placement in layout)


LOCAL = frozenset({"none", "slice", "pad", "mask"})
"""Changes inside one device.  Their price is 0, because they copy little compared to what they save."""
