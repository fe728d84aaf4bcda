"""A chain of layers as numbers, and dynamic programming over it.

Choose one candidate x_l per layer.  What a *path* of them takes::

    time(x)  = fixed_s + sum_l time_s[x_l] + sum_l moves_s[l][state_out(x_l), state_in(x_{l+1})]
               + sum over skips   moves_s[state_out(x_producer), state_in(x_reader)]
    bytes(x) = fixed_bytes + sum_l persistent_bytes[x_l] + max_l transient_bytes[x_l]

For a price of memory (seconds per byte) and a cap on transients, dynamic programming with the boundary state as its
state finds the path with the least ``time + price * persistent bytes`` exactly, if no value skips a layer.  Skips
(values that a layer reads from further back) are bounded from below in a first pass and improved by coordinate descent:
readers adapt to producers, then producers to readers.  `autopar.search.chain.lagrangian` chooses the prices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Chain", "ChainLayer", "Skip", "path_costs", "relaxed_paths"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Rounds in which the readers, then the producers, of values that skip layers adapt to each other: coordinate descent.
# Each round takes two shortest paths more for every price of memory.
_SKIP_ROUNDS = 2


@dataclass(frozen=True, eq=False)
class ChainLayer:
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
    """The problem.  `moves_s[l]` is between layers l and l + 1; layers and moves may repeat."""

    num_states: int
    layers: tuple[ChainLayer, ...]
    moves_s: tuple[Array, ...]
    skips: tuple[Skip, ...] = ()
    fixed_s: float = 0.0
    fixed_bytes: float = 0.0

    @cached_property
    def distinct_layers(self) -> tuple[tuple[ChainLayer, Indices], ...]:
        """The distinct layers, and where each of them stands."""
        places: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            places.setdefault(id(layer), []).append(index)
        return tuple((self.layers[own[0]], np.array(own)) for own in places.values())

    @cached_property
    def crossings(self) -> tuple[tuple[Array, ChainLayer, ChainLayer, Indices], ...]:
        """The distinct moves between distinct neighbors that cost anything, these neighbors, and where the second of
        them stand."""
        places: dict[tuple[int, int, int], list[int]] = {}
        for index, moves_s in enumerate(self.moves_s, 1):
            key = (id(moves_s), id(self.layers[index - 1]), id(self.layers[index]))
            places.setdefault(key, []).append(index)
        return tuple(
            (self.moves_s[own[0] - 1], self.layers[own[0] - 1], self.layers[own[0]], np.array(own))
            for own in places.values()
            if self.moves_s[own[0] - 1].any()
        )

    @cached_property
    def transient_levels(self) -> Array:
        """The distinct transients of candidates in bytes, ascending; every path has at least the first."""
        layers = [layer for layer, _ in self.distinct_layers]
        levels = np.unique(np.concatenate([layer.transient_bytes for layer in layers]))
        return levels[levels >= max(float(layer.transient_bytes.min()) for layer in layers)]

    @cached_property
    def ways(self) -> dict[int, Indices]:
        """By the id of a layer, per candidate the place of (state behind, state before) in a matrix of all pairs."""
        return {id(layer): layer.state_out * self.num_states + layer.state_in for layer, _ in self.distinct_layers}

    @cached_property
    def moves_to_s(self) -> tuple[Array, ...]:
        """`moves_s` by (state behind, state before): a minimum along rows is the fast one."""
        distinct = {id(moves): np.ascontiguousarray(moves.T) for moves in self.moves_s}
        return tuple(distinct[id(moves)] for moves in self.moves_s)


def path_costs(chain: Chain, paths: Indices) -> Array:
    """Seconds, persistent bytes and largest transient bytes of paths, one row each.

    `paths[i, l]` is the candidate that path i takes in layer l.
    """
    costs = np.tile(np.array([chain.fixed_s, chain.fixed_bytes, 0.0]), (len(paths), 1))
    # Equal layers are looked up together, and so are moves between such layers.
    for layer, places in chain.distinct_layers:
        chosen = paths[:, places]
        costs[:, 0] += layer.time_s[chosen].sum(axis=1)
        costs[:, 1] += layer.persistent_bytes[chosen].sum(axis=1)
        costs[:, 2] = np.maximum(costs[:, 2], layer.transient_bytes[chosen].max(axis=1))
    for moves_s, before, layer, places in chain.crossings:
        source = before.state_out[paths[:, places - 1]]
        costs[:, 0] += moves_s[source, layer.state_in[paths[:, places]]].sum(axis=1)
    for skip in chain.skips:
        source = chain.layers[skip.producer].state_out[paths[:, skip.producer]]
        costs[:, 0] += skip.moves_s[source, chain.layers[skip.reader].state_in[paths[:, skip.reader]]]
    return costs


def relaxed_paths(chain: Chain, price_s_per_byte: float, cap_bytes: float) -> tuple[float, list[Indices]]:
    """A lower bound on ``time + price * persistent bytes``, less the chain's fixed part, of all paths whose transients
    stay under the cap; and paths, the first of which attains the bound where no value skips a layer.
    """
    value, path = _shortest(chain, price_s_per_byte, cap_bytes, _skip_bounds(chain))
    paths = [path]
    for round_number in range(_SKIP_ROUNDS * 2 if chain.skips else 0):
        extra = _skip_costs(chain, paths[-1], round_number % 2 == 0)
        paths.append(_shortest(chain, price_s_per_byte, cap_bytes, extra)[1])
    return value, paths


# Seconds added to a layer by its state: (before the layer, behind it).
Extra = dict[int, tuple[Array, Array]]


def _skip_bounds(chain: Chain) -> Extra:
    extra = _no_extra(chain)
    for skip in chain.skips:
        states = np.unique(chain.layers[skip.producer].state_out)
        extra[skip.reader][0][:] += skip.moves_s[states].min(axis=0)
    return extra


def _no_extra(chain: Chain) -> Extra:
    touched = {layer for skip in chain.skips for layer in (skip.producer, skip.reader)}
    return {layer: (np.zeros(chain.num_states), np.zeros(chain.num_states)) for layer in touched}


def _skip_costs(chain: Chain, path: Indices, readers_adapt: bool) -> Extra:
    """The skips' exact costs when the ends that don't adapt stay in their states of `path`."""
    extra = _no_extra(chain)
    for skip in chain.skips:
        source = chain.layers[skip.producer].state_out[path[skip.producer]]
        target = chain.layers[skip.reader].state_in[path[skip.reader]]
        if readers_adapt:
            extra[skip.reader][0][:] += skip.moves_s[source]
            extra[skip.producer][1][:] += np.where(np.arange(chain.num_states) == source, 0.0, np.inf)
        else:
            extra[skip.producer][1][:] += skip.moves_s[:, target]
            extra[skip.reader][0][:] += np.where(np.arange(chain.num_states) == target, 0.0, np.inf)
    return extra


def _shortest(chain: Chain, price: float, cap: float, extra: Extra) -> tuple[float, Indices]:
    """Dynamic programming over the layers: the least value, without the chain's fixed part, and its path."""
    # By (state behind, state before): a minimum along rows is the fast one.
    cheapest = {
        id(layer): _cheapest(chain.num_states, layer, chain.ways[id(layer)], price, cap)
        for layer, _ in chain.distinct_layers
    }
    reached = np.zeros(chain.num_states)
    came: list[tuple[Indices, Indices]] = []
    states = np.arange(chain.num_states)
    for index, layer in enumerate(chain.layers):
        source = states
        if index:
            source, reached = _arrive(chain.moves_to_s[index - 1], reached, states)
        if index in extra:
            reached = reached + extra[index][0]
        entry, reached = _arrive(cheapest[id(layer)][0], reached, states)
        if index in extra:
            reached = reached + extra[index][1]
        came.append((source, entry))
    state = int(reached.argmin())
    value = float(reached[state])
    path = np.zeros(len(chain.layers), dtype=np.intp)
    for index in range(len(chain.layers) - 1, -1, -1):
        source, entry = came[index]
        path[index] = cheapest[id(chain.layers[index])][1][state, entry[state]]
        state = int(source[entry[state]])
    return value, path


def _arrive(matrix: Array, reached: Array, states: Indices) -> tuple[Indices, Array]:
    """Per row of `matrix` the cheapest column to come from, and the total cost."""
    total = matrix + reached
    best = total.argmin(axis=1)
    return best, total[states, best]


def _cheapest(num_states: int, layer: ChainLayer, ways: Indices, price: float, cap: float) -> tuple[Array, Indices]:
    """Per (state behind, state before) the least value of a candidate, and which it is; `ways` is the candidates'."""
    value = layer.time_s + price * layer.persistent_bytes
    value = np.where(layer.transient_bytes <= cap, value, np.inf)
    order = np.argsort(value, kind="stable")[::-1]  # where an index repeats, the last assignment stays
    least = np.full(num_states * num_states, np.inf)
    which = np.zeros(num_states * num_states, dtype=np.intp)
    least[ways[order]] = value[order]
    which[ways[order]] = order
    return least.reshape(num_states, num_states), which.reshape(num_states, num_states)
