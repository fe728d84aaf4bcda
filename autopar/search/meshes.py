"""The mesh shapes that a layer may use."""

from __future__ import annotations

import itertools
import math

__all__ = ["mesh_shapes"]


def mesh_shapes(world_size: int, devices_per_node: int, max_axes: int = 2) -> tuple[tuple[int, ...], ...]:
    """All meshes of `world_size` devices with at most `max_axes` axes, fewest axes first.

    Every mesh merges neighbouring factors of one chain: the primes of the number of nodes, largest first,
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
