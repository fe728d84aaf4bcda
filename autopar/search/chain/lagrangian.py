"""Fast paths through a chain for every amount of memory, by Lagrangian relaxation of the memory limit.

Of a `autopar.search.chain.chain_dp.Chain`, minimize the seconds over all paths whose bytes stay within a limit.
`fastest_paths` makes a pool of paths that does not depend on the limit, so a larger limit can only give an equal or
faster path.  For caps on transients, the lower convex hull of (persistent bytes, seconds) is followed by prices of
memory, for each of which dynamic programming is exact; paths that begin as one point of the hull and end as the next
are added.  The same relaxations bound the seconds from below for any limit (`PathPool.lower_bound_s`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.search.chain.chain_dp import Chain, path_costs, relaxed_paths
from autopar.step.costs.hull import HullPoint, follow_hull

__all__ = ["PathPool", "fastest_path", "fastest_paths", "pareto_indices", "smallest_path", "transient_caps"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Each point of the hull under each cap costs one run of dynamic programming.  On a decoder of 16 layers, on 8 devices
# with 12 and 20 GiB, the optimality gap with 6 prices is 0.5 and 1.0 %, with 12 as with 48 it is 0.4 and 0.1 %; with 2
# caps it is 0.6 % (12 GiB), with 6 as with 12 0.4 %.  Twice the prices are for models with more kinds of layers.
_MAX_PRICES = 24
_MAX_CAPS = 6
_DEAREST_S_PER_BYTE = 1.0  # at this price memory alone decides: no step takes 1 s per byte
_SAME_BYTES = 1e-3  # relative: what takes the least memory is not sought more closely
_ROUNDING = 8 * float(np.finfo(np.float64).eps)  # of a difference of two values, relative to the larger one


@dataclass(frozen=True, eq=False)
class _Relaxation:
    """A lower bound `value_s` on time + price * persistent bytes, and the path of the hull at this price."""

    price: float
    value_s: float
    path: Indices

    def bound_s(self, allowed_bytes: float) -> float:
        """A lower bound on the seconds of paths that hold at most so many bytes, rounding included."""
        paid_s = self.price * allowed_bytes
        return self.value_s - paid_s - _ROUNDING * max(abs(self.value_s), abs(paid_s))


@dataclass(eq=False)
class PathPool:
    """Paths with their costs, and the relaxations that bound what is possible.

    `relaxations` has, for each cap on transients, the cap below it and the relaxations under it.
    """

    chain: Chain
    paths: list[Indices] = field(default_factory=list[Indices])
    time_s: list[float] = field(default_factory=list[float])
    peak_bytes: list[float] = field(default_factory=list[float])
    relaxations: list[tuple[float, list[_Relaxation]]] = field(default_factory=list[tuple[float, list[_Relaxation]]])

    def add(self, *paths: Indices) -> Array:
        """Put paths into the pool; their times, persistent and peak bytes, one row each."""
        costs = path_costs(self.chain, np.stack(paths))
        self.paths.extend(paths)
        self.time_s.extend(costs[:, 0].tolist())
        self.peak_bytes.extend((costs[:, 1] + costs[:, 2]).tolist())
        return costs

    def best(self, limit_bytes: float) -> int:
        """Index of the fastest path within the limit (of equals the smallest), -1 if none fits."""
        fitting = [i for i, peak in enumerate(self.peak_bytes) if peak <= limit_bytes]
        return min(fitting, key=lambda i: (self.time_s[i], self.peak_bytes[i]), default=-1)

    def smallest(self) -> int:
        """Index of the path with the least memory."""
        return min(range(len(self.paths)), key=lambda i: (self.peak_bytes[i], self.time_s[i]))

    def lower_bound_s(self, limit_bytes: float) -> float:
        """No path of the chain within the limit is faster than this."""
        allowed = limit_bytes - self.chain.fixed_bytes
        return self.chain.fixed_s + min(
            max(each.bound_s(allowed - below) for each in relaxations) for below, relaxations in self.relaxations
        )


def pareto_indices(seconds: npt.ArrayLike, num_bytes: npt.ArrayLike) -> list[int]:
    """Indices of those that no other beats in seconds and bytes, the fastest first; of equals the first."""
    seconds, num_bytes = np.asarray(seconds, dtype=np.float64), np.asarray(num_bytes, dtype=np.float64)
    order = np.lexsort((num_bytes, seconds))
    least = np.minimum.accumulate(np.concatenate([[np.inf], num_bytes[order]]))[:-1]
    return order[num_bytes[order] < least].tolist()


def fastest_paths(
    chain: Chain,
    *,
    max_prices: int = _MAX_PRICES,
    max_caps: int = _MAX_CAPS,
    mixes: bool = True,
    aim_bytes: float = -np.inf,
) -> PathPool:
    """A pool of fast paths for every amount of memory.

    Args:
        chain: the problem.
        max_prices: most points of the hull for each cap on transients.
        max_caps: most caps on transients.
        mixes: whether paths that begin as one point of the hull and end as the next are in the pool, and the one that
            takes the least memory.
        aim_bytes: the bytes around which the hull is refined first; by default everywhere equally.
    """
    pool = PathPool(chain)
    below = float(chain.transient_levels[0])
    for cap in transient_caps(chain, max_caps):
        hull = _follow_hull(pool, cap, max_prices, aim_bytes)
        pool.relaxations.append((below, hull))
        below = cap
        for one, other in itertools.pairwise(hull) if mixes else ():
            _add_mixes(pool, one.path, other.path)
            _add_mixes(pool, other.path, one.path)
    if mixes:
        _add_smallest(pool)
    return pool


def fastest_path(chain: Chain) -> tuple[Indices, float]:
    """The fastest path of a chain without skips, whatever its memory, and its peak bytes."""
    pool = PathPool(chain)
    relaxation, _ = _relax(pool, 0.0, np.inf)
    return relaxation.path, pool.peak_bytes[0]


def smallest_path(chain: Chain) -> Indices:
    """The path that takes the least memory."""
    pool = PathPool(chain)
    _add_smallest(pool)
    return pool.paths[pool.smallest()]


def _add_smallest(pool: PathPool) -> None:
    """Add the path that takes the least memory: its transients may lie between the caps that were tried.

    The higher the cap, the less is persistent.  So between two caps nothing takes less than what is persistent under
    the upper one and the next transients above the lower one; where that might be less, the middle is tried.
    """
    levels = pool.chain.transient_levels

    def persistent_bytes(index: int) -> float:
        return _relax(pool, _DEAREST_S_PER_BYTE, float(levels[index]))[1]

    last = len(levels) - 1
    upper_bytes = {index: persistent_bytes(index) for index in {0, last}}
    intervals = [(0, last)]
    while intervals:
        low, high = intervals.pop()
        if high - low < 2 or upper_bytes[high] + levels[low + 1] >= min(pool.peak_bytes) * (1 - _SAME_BYTES):
            continue
        middle = (low + high) // 2
        upper_bytes[middle] = persistent_bytes(middle)
        intervals += [(low, middle), (middle, high)]


def transient_caps(chain: Chain, max_caps: int) -> list[float]:
    """Caps on transients: from the least that some path needs to no cap at all."""
    levels = chain.transient_levels
    if len(levels) > max_caps:
        low, high = (max(float(level), 1.0) for level in (levels[0], levels[-1]))
        spaced = low * (high / low) ** (np.arange(max_caps) / (max_caps - 1))
        levels = np.unique(levels[np.clip(np.searchsorted(levels, spaced * (1 - 1e-12)), 0, len(levels) - 1)])
    return [float(level) for level in levels]


def _follow_hull(pool: PathPool, cap: float, max_prices: int, aim_bytes: float) -> list[_Relaxation]:
    """Relaxations along the lower convex hull of (persistent bytes, seconds), by price."""
    fixed_bytes = pool.chain.fixed_bytes

    def best_at(price: float) -> HullPoint[_Relaxation]:
        relaxation, persistent = _relax(pool, price, cap)
        own_bytes = persistent - fixed_bytes
        return HullPoint(relaxation.value_s - price * own_bytes, own_bytes, relaxation)

    points = follow_hull(best_at, _DEAREST_S_PER_BYTE, max_prices, aim_bytes - fixed_bytes)
    return [points[price].choice for price in sorted(points)]


def _relax(pool: PathPool, price: float, cap: float) -> tuple[_Relaxation, float]:
    """The relaxation at this price under this cap, and its path's persistent bytes; its paths go into the pool."""
    value, paths = relaxed_paths(pool.chain, price, cap)
    persistent = float(pool.add(*paths)[0, 1])
    return _Relaxation(price, value, paths[0]), persistent


def _add_mixes(pool: PathPool, first: Indices, rest: Indices) -> None:
    """Add the paths that follow `first` up to some layer and `rest` from there on."""
    cuts = np.flatnonzero(first[:-1] != rest[:-1]) + 1
    if len(cuts):
        pool.add(*np.where(np.arange(len(first)) < cuts[:, None], first, rest))
