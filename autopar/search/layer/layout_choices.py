"""The meshes and layouts that the search chooses from.

* *Meshes* of a layer: every way to merge neighboring prime factors of the number of devices.
* At a *boundary* between layers, all activations take their layouts from one **policy**, which names for each mesh axis
  ``R``, ``S(0)`` or ``S(1)``, and on one axis the dim that is split in space, if there is one.  So the search across
  layers has few states however many tensors cross.
* *Storage* of a parameter follows from the layout in which compute reads it and from the mesh axes on which ZeRO or
  HSDP shards it.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from autopar.placement import REPLICATE, Layout, Placement, shard
from autopar.program import Program, TensorType

__all__ = [
    "Policy",
    "arrival_layout",
    "boundary_layout",
    "boundary_policies",
    "has_whole_boundary",
    "mesh_shapes",
    "storage_layout",
]

# Per mesh axis R, S(0), S(1) or a dim that is split in space.
Policy = Layout

_POLICY_PLACEMENTS: tuple[Placement, ...] = (REPLICATE, shard(0), shard(1))


def mesh_shapes(world_size: int, devices_per_node: int, max_axes: int = 2) -> tuple[tuple[int, ...], ...]:
    """All meshes of `world_size` devices with at most `max_axes` axes, fewest axes first.

    Every mesh merges neighboring factors of one chain: the primes of the number of nodes, largest first,
    then those of `devices_per_node`.  So any two of them have a common refinement
    (`autopar.placement.refine_mesh`). A world of one device has the one mesh ``(1,)``; all other axes are
    longer than 1.

    A world that fills no whole number of nodes counts as one node.

    >>> mesh_shapes(8, 4)
    ((8,), (2, 4), (4, 2))
    """
    per_node = devices_per_node if world_size % devices_per_node == 0 else world_size
    chain = (*_primes(world_size // per_node), *_primes(per_node))
    if not chain:
        return ((1,),)
    shapes: dict[tuple[int, ...], None] = {}
    for num_cuts in range(min(max_axes, len(chain))):
        for cuts in itertools.combinations(range(1, len(chain)), num_cuts):
            bounds = (0, *cuts, len(chain))
            shapes[tuple(math.prod(chain[a:b]) for a, b in itertools.pairwise(bounds))] = None
    return tuple(shapes)


def _primes(number: int) -> tuple[int, ...]:
    """The prime factors of `number`, largest first."""
    primes: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(reversed(primes))


def boundary_policies(mesh: tuple[int, ...], space: int = 0) -> tuple[Policy, ...]:
    """Every policy on `mesh`; an axis of one device has only ``R``.  The first is all ``R``.

    With `space`, one axis may also split that dim: halos are exchanged on one axis only.
    """
    placements = (*_POLICY_PLACEMENTS, shard(space)) if space else _POLICY_PLACEMENTS
    every = itertools.product(*(placements if size > 1 else (REPLICATE,) for size in mesh))
    return tuple(policy for policy in every if not space or policy.count(shard(space)) <= 1)


def boundary_layout(policy: Policy, tensor: TensorType, mesh: tuple[int, ...]) -> Layout:
    """The layout that `policy` gives a tensor: its placement on each axis where that dim exists and divides.

    Axes are served from the outermost; where the tensor can't follow, it is whole (``R``).
    """
    sizes = list(tensor.shape)
    layout: list[Placement] = []
    for placement, size in zip(policy, mesh, strict=True):
        follows = placement.is_shard and placement.dim < len(sizes) and sizes[placement.dim] % size == 0
        if follows:
            sizes[placement.dim] //= size
        layout.append(placement if follows else REPLICATE)
    return tuple(layout)


def has_whole_boundary(program: Program, name: str) -> bool:
    """Whether this value is whole (``R`` on all axes) wherever it crosses a boundary, whatever the policy.

    So are the model's inputs (each rank gets the plain global batch) and what is computed from them without a
    parameter (masks, rotary tables ...: every device computes it, and no layer has to gather it), new values
    of buffers, the loss, and, in a model without a loss inside, all outputs but those that are carried.
    """
    if name in program.carried:
        return name in program.inputs  # in slices, rather, but those cost nothing
    if name in _parameter_free(_Identity(program)) or name in program.updates.values():
        return True
    return name in program.whole_results


class _Identity:
    """A program as a key: to compare or hash its contents would cost more than what is looked up."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __hash__(self) -> int:
        return id(self.program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.program is self.program


@lru_cache(maxsize=8)
def _parameter_free(key: _Identity) -> frozenset[str]:
    """The values into which no parameter flows: inputs, constants, and what is computed from those alone."""
    program = key.program
    free = {name for name, value in program.values.items() if value.role in ("constant", "buffer")}
    free.update(program.inputs)
    for layer in program.layers:
        for op in layer.ops:
            if free.issuperset(op.operands):
                free.update(name for name in op.results if not program.values[name].requires_grad)
    return frozenset(free)


def arrival_layout(
    program: Program, name: str, policy: Policy, mesh: tuple[int, ...], tensor: TensorType | None = None
) -> Layout:
    """The layout in which value `name` crosses a boundary of this policy, on either side of it.

    `tensor` is what one microbatch holds of it, if there are several.
    """
    if has_whole_boundary(program, name):
        return (REPLICATE,) * len(mesh)
    return boundary_layout(policy, tensor or program.type_of(name), mesh)


@lru_cache(maxsize=1 << 16)
def storage_layout(copy: Layout, tensor: TensorType, mesh: tuple[int, ...], shard_axes: tuple[int, ...] = ()) -> Layout:
    """The layout in which a parameter is stored that compute reads as `copy`.

    Where compute reads a slice, that slice is stored, or, of a dim in several parts, one of another dim: files and
    optimizers know contiguous slices only.  On those of `shard_axes` (indices of mesh axes) where
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
    parted = [axis for axis, p in enumerate(copy) if p.parts > 1 and mesh[axis] > 1]
    stored = _on_best_dim(parted, copy, tensor, mesh)
    return _on_best_dim(free, tuple(p if p.is_shard and p.parts == 1 else REPLICATE for p in stored), tensor, mesh)


def _on_best_dim(free: list[int], copy: Layout, tensor: TensorType, mesh: tuple[int, ...]) -> Layout:
    """`copy` with the dim that can be cut on most devices of the `free` axes cut on these."""
    best: tuple[int, dict[int, Placement]] = (1, {})
    for dim in range(len(tensor.shape)):
        degree, axes = _serve(dim, free, copy, tensor, mesh)
        if degree > best[0]:
            best = (degree, {axis: shard(dim) for axis in axes})
    return tuple(best[1].get(axis, placement) for axis, placement in enumerate(copy))


def _serve(dim: int, free: list[int], copy: Layout, tensor: TensorType, mesh: tuple[int, ...]) -> tuple[int, list[int]]:
    """On which of the `free` axes dim `dim` can be stored in slices, and into how many."""
    cut_by_compute = [axis for axis, placement in enumerate(copy) if placement.is_shard and placement.dim == dim]
    size = tensor.shape[dim]
    for axis in cut_by_compute:
        size //= mesh[axis]
    degree, axes = 1, list[int]()
    for axis in sorted(free):
        if axis > max(cut_by_compute, default=-1) and size % (degree * mesh[axis]) == 0:
            degree *= mesh[axis]
            axes.append(axis)
    return degree, axes
