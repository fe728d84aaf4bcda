"""A chain of layers as numbers, and the fastest ways through it for every amount of memory.

Minimise over one candidate x_l per layer::

    time(x)      = fixed_s + sum_l time_s[x_l] + sum_l moves_s[l][state_out(x_l), state_in(x_{l+1})]
                   + sum over skips   moves_s[state_out(x_producer), state_in(x_reader)]
    subject to   fixed_bytes + sum_l persistent_bytes[x_l] + max_l transient_bytes[x_l] <= limit

`fastest_paths` finds a pool of paths that does not depend on the limit, so a larger limit can only give an
equal or faster path.  For a price of memory (seconds per byte) and a cap on transients, dynamic programming
over the layers with the boundary state as state is exact (`_sweep`); prices are chosen by following the
lower convex hull; between neighbours on the hull the paths that take their first layers from one and the
rest from the other are added (`_mix`).

The same sweeps give a Lagrangian lower bound for any limit (`Paths.lower_bound_s`).  Skips (values that a
layer reads from further back) are bounded from below in the sweep and improved by coordinate descent:
readers adapt to producers, then producers to readers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Chain", "LayerTable", "Paths", "Skip", "fastest_path", "fastest_paths", "path_costs", "unbeaten"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_MAX_PRICES = 24  # hull points per cap on transients
_MAX_CAPS = 6
_DEAREST_S_PER_BYTE = 1.0  # dear enough that memory alone decides
_SKIP_ROUNDS = 2


@dataclass(frozen=True, eq=False)
class LayerTable:
    """The candidates of one layer, one entry each; states index the chain's boundary states."""

    time_s: Array
    persistent_bytes: Array
    transient_bytes: Array
    state_in: Indices
    state_out: Indices


@dataclass(frozen=True, eq=False)
class Skip:
    """What it costs to bring values from the layer `producer` to `reader`, by their states."""

    producer: int
    reader: int
    moves_s: Array


@dataclass(frozen=True, eq=False)
class Chain:
    """The problem.  `moves_s[l]` lies between layers l and l + 1; tables and moves may repeat."""

    num_states: int
    tables: tuple[LayerTable, ...]
    moves_s: tuple[Array, ...]
    skips: tuple[Skip, ...] = ()
    fixed_s: float = 0.0
    fixed_bytes: float = 0.0


@dataclass(frozen=True, eq=False)
class _Sweep:
    """The optimum at one price and cap: `value_s` = time + price * persistent, skips bounded from below."""

    price: float
    value_s: float
    path: Indices


@dataclass(eq=False)
class Paths:
    """A pool of paths with their costs, and the sweeps that bound what is possible.

    `sweeps` has for each cap on transients: (the largest transient below the cap's class, the sweeps).
    """

    chain: Chain
    paths: list[Indices] = field(default_factory=list[Indices])
    time_s: list[float] = field(default_factory=list[float])
    peak_bytes: list[float] = field(default_factory=list[float])
    sweeps: list[tuple[float, list[_Sweep]]] = field(default_factory=list[tuple[float, list[_Sweep]]])

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
        """Index of the path that takes the least memory."""
        return min(range(len(self.paths)), key=lambda i: (self.peak_bytes[i], self.time_s[i]))

    def lower_bound_s(self, limit_bytes: float) -> float:
        """No path of the chain within the limit is faster than this."""
        bounds = [
            max(_bound_s(s, limit_bytes - self.chain.fixed_bytes - below) for s in sweeps)
            for below, sweeps in self.sweeps
        ]
        return self.chain.fixed_s + min(bounds)


def _bound_s(sweep: _Sweep, allowed_bytes: float) -> float:
    """What a sweep says of any path that holds at most so many bytes; less what the difference of two large numbers
    may be rounded up by.
    """
    paid_s = sweep.price * allowed_bytes
    rounding_s = 8 * float(np.finfo(np.float64).eps) * max(abs(sweep.value_s), abs(paid_s))
    return sweep.value_s - paid_s - rounding_s


def unbeaten(seconds: npt.ArrayLike, num_bytes: npt.ArrayLike) -> list[int]:
    """Indices of those that no other beats in seconds and bytes, the fastest first; of equals the first."""
    seconds, num_bytes = np.asarray(seconds, dtype=np.float64), np.asarray(num_bytes, dtype=np.float64)
    order = np.lexsort((num_bytes, seconds))
    least = np.minimum.accumulate(np.concatenate([[np.inf], num_bytes[order]]))[:-1]
    return order[num_bytes[order] < least].tolist()


def path_costs(chain: Chain, paths: Indices) -> Array:
    """Seconds, persistent bytes and largest transient bytes of paths, one row each.

    `paths[i, l]` is the candidate that path i takes in layer l.
    """
    costs = np.tile(np.array([chain.fixed_s, chain.fixed_bytes, 0.0]), (len(paths), 1))
    # Layers with equal tables are looked up together, and so are moves between such layers.
    places: dict[int, list[int]] = {}
    crossed: dict[tuple[int, int, int], list[int]] = {}
    for layer, table in enumerate(chain.tables):
        places.setdefault(id(table), []).append(layer)
        if layer:
            crossed.setdefault((id(chain.moves_s[layer - 1]), id(chain.tables[layer - 1]), id(table)), []).append(layer)
    for layers in places.values():
        table, chosen = chain.tables[layers[0]], paths[:, layers]
        costs[:, 0] += table.time_s[chosen].sum(axis=1)
        costs[:, 1] += table.persistent_bytes[chosen].sum(axis=1)
        costs[:, 2] = np.maximum(costs[:, 2], table.transient_bytes[chosen].max(axis=1))
    for layers in crossed.values():
        first = layers[0]
        moves_s = chain.moves_s[first - 1]
        if moves_s.any():
            source = chain.tables[first - 1].state_out[paths[:, [layer - 1 for layer in layers]]]
            costs[:, 0] += moves_s[source, chain.tables[first].state_in[paths[:, layers]]].sum(axis=1)
    for skip in chain.skips:
        source = chain.tables[skip.producer].state_out[paths[:, skip.producer]]
        costs[:, 0] += skip.moves_s[source, chain.tables[skip.reader].state_in[paths[:, skip.reader]]]
    return costs


def fastest_paths(
    chain: Chain,
    *,
    max_prices: int = _MAX_PRICES,
    max_caps: int = _MAX_CAPS,
    mixes: bool = True,
    aim_bytes: float = -np.inf,
) -> Paths:
    """A pool of fast paths for every amount of memory.

    Args:
        chain: the problem.
        max_prices: most points of the hull for each cap on transients.
        max_caps: most caps on transients.
        mixes: whether paths that begin as one point of the hull and end as the next are in the pool.
        aim_bytes: where the hull is followed first, if not everywhere alike.
    """
    pool = Paths(chain)
    below = max(float(table.transient_bytes.min()) for table in chain.tables)
    for cap in _caps(chain, below, max_caps):
        hull = _follow_hull(pool, cap, max_prices, aim_bytes)
        pool.sweeps.append((below, hull))
        below = cap
        for one, other in itertools.pairwise(hull) if mixes else ():
            _mix(pool, one.path, other.path)
            _mix(pool, other.path, one.path)
    return pool


def fastest_path(chain: Chain) -> tuple[Indices, float]:
    """The fastest path of a chain without skips, whatever it takes, and its peak bytes."""
    pool = Paths(chain)
    sweep, _ = _sweep(pool, 0.0, np.inf)
    return sweep.path, pool.peak_bytes[0]


def _caps(chain: Chain, smallest: float, max_caps: int) -> list[float]:
    """Caps on transients: from the least that some path needs to no cap at all."""
    distinct = {id(table): table for table in chain.tables}
    levels = np.unique(np.concatenate([table.transient_bytes for table in distinct.values()]))
    levels = levels[levels >= smallest]
    if len(levels) > max_caps:
        low, high = (max(float(level), 1.0) for level in (levels[0], levels[-1]))
        wanted = low * (high / low) ** (np.arange(max_caps) / (max_caps - 1))
        levels = np.unique(levels[np.clip(np.searchsorted(levels, wanted * (1 - 1e-12)), 0, len(levels) - 1)])
    return [float(level) for level in levels]


def _follow_hull(pool: Paths, cap: float, max_prices: int, aim_bytes: float) -> list[_Sweep]:
    """Sweeps along the lower convex hull of (persistent bytes, seconds), by price."""
    points: dict[float, tuple[_Sweep, float, float]] = {}

    def visit(price: float) -> tuple[_Sweep, float, float]:
        sweep, persistent = _sweep(pool, price, cap)
        points[price] = (sweep, sweep.value_s - price * (persistent - pool.chain.fixed_bytes), persistent)
        return points[price]

    pairs = [(visit(0.0), visit(_DEAREST_S_PER_BYTE))]
    while pairs and len(points) < max_prices:
        # The pair with the most memory between its ends first: there a missing point hurts most.
        pairs.sort(key=lambda pair: (pair[1][2] <= aim_bytes <= pair[0][2], pair[0][2] - pair[1][2]))
        fast, small = pairs.pop()
        saved = fast[2] - small[2]
        price = (small[1] - fast[1]) / saved if saved > 0 else 0.0
        if price <= 0 or price in points:
            continue
        middle = visit(price)
        if middle[0].value_s < (fast[1] + price * (fast[2] - pool.chain.fixed_bytes)) * (1 - 1e-9):
            pairs += [(fast, middle), (middle, small)]
    return [points[price][0] for price in sorted(points)]


def _sweep(pool: Paths, price: float, cap: float) -> tuple[_Sweep, float]:
    """The exact optimum at this price under this cap, and its persistent bytes; the paths found go into the
    pool.
    """
    chain = pool.chain
    value, path = _shortest(chain, price, cap, _skip_bounds(chain))
    found = [path]
    for round_number in range(_SKIP_ROUNDS * 2 if chain.skips else 0):
        extra = _skip_costs(chain, found[-1], round_number % 2 == 0)
        found.append(_shortest(chain, price, cap, extra)[1])
    persistent = float(pool.add(*found)[0, 1])
    return _Sweep(price, value, path), persistent


# Seconds added to a layer by its state: (before the layer, behind it).
Extra = dict[int, tuple[Array, Array]]


def _skip_bounds(chain: Chain) -> Extra:
    extra = _no_extra(chain)
    for skip in chain.skips:
        states = np.unique(chain.tables[skip.producer].state_out)
        extra[skip.reader][0][:] += skip.moves_s[states].min(axis=0)
    return extra


def _no_extra(chain: Chain) -> Extra:
    touched = {layer for skip in chain.skips for layer in (skip.producer, skip.reader)}
    return {layer: (np.zeros(chain.num_states), np.zeros(chain.num_states)) for layer in touched}


def _skip_costs(chain: Chain, path: Indices, readers_adapt: bool) -> Extra:
    """The skips' exact costs when the ends that don't adapt stay in their states of `path`."""
    extra = _no_extra(chain)
    for skip in chain.skips:
        source = chain.tables[skip.producer].state_out[path[skip.producer]]
        target = chain.tables[skip.reader].state_in[path[skip.reader]]
        if readers_adapt:
            extra[skip.reader][0][:] += skip.moves_s[source]
            extra[skip.producer][1][:] += np.where(np.arange(chain.num_states) == source, 0.0, np.inf)
        else:
            extra[skip.producer][1][:] += skip.moves_s[:, target]
            extra[skip.reader][0][:] += np.where(np.arange(chain.num_states) == target, 0.0, np.inf)
    return extra


def _shortest(chain: Chain, price: float, cap: float, extra: Extra) -> tuple[float, Indices]:
    """Dynamic programming over the layers: the least value, without the chain's fixed part, and its path."""
    matrices: dict[int, tuple[Array, Indices]] = {}
    # By (state behind, state before): a minimum along rows is the fast one.
    through_s: dict[int, Array] = {}
    distinct = {id(moves): moves for moves in chain.moves_s}
    moves_s = {key: np.ascontiguousarray(moves.T) for key, moves in distinct.items()}
    for table in chain.tables:
        if id(table) not in matrices:
            matrices[id(table)] = _cheapest(chain.num_states, table, price, cap)
            through_s[id(table)] = np.ascontiguousarray(matrices[id(table)][0].T)
    reached = np.zeros(chain.num_states)
    came: list[tuple[Indices, Indices]] = []
    states = np.arange(chain.num_states)
    for layer, table in enumerate(chain.tables):
        source = states
        if layer:
            source, reached = _arrive(moves_s[id(chain.moves_s[layer - 1])], reached, states)
        if layer in extra:
            reached = reached + extra[layer][0]
        entry, reached = _arrive(through_s[id(table)], reached, states)
        if layer in extra:
            reached = reached + extra[layer][1]
        came.append((source, entry))
    state = int(reached.argmin())
    value = float(reached[state])
    path = np.zeros(len(chain.tables), dtype=np.intp)
    for layer in range(len(chain.tables) - 1, -1, -1):
        source, entry = came[layer]
        path[layer] = matrices[id(chain.tables[layer])][1][entry[state], state]
        state = int(source[entry[state]])
    return value, path


def _arrive(matrix: Array, reached: Array, states: Indices) -> tuple[Indices, Array]:
    """Per row of `matrix` the column from which it is cheapest to come, and what that takes in all."""
    total = matrix + reached
    best = total.argmin(axis=1)
    return best, total[states, best]


def _cheapest(num_states: int, table: LayerTable, price: float, cap: float) -> tuple[Array, Indices]:
    """Per (state before, state behind) the least value of a candidate, and which it is."""
    value = table.time_s + price * table.persistent_bytes
    value = np.where(table.transient_bytes <= cap, value, np.inf)
    order = np.argsort(value, kind="stable")[::-1]  # where an index repeats, the last assignment stays
    least = np.full((num_states, num_states), np.inf)
    which = np.zeros((num_states, num_states), dtype=np.intp)
    least[table.state_in[order], table.state_out[order]] = value[order]
    which[table.state_in[order], table.state_out[order]] = order
    return least, which


def _mix(pool: Paths, first: Indices, rest: Indices) -> None:
    """Add the paths that follow `first` up to some layer and `rest` from there on."""
    cuts = [cut for cut in range(1, len(first)) if first[cut - 1] != rest[cut - 1]]
    if cuts:
        pool.add(*(np.concatenate([first[:cut], rest[cut:]]) for cut in cuts))
