"""The fastest path through the chain of a device group within a memory limit.

`autopar.search.chain.lagrangian` finds the paths on the convex hull of (bytes, seconds) for all limits.  Here one limit
is known, so only the two points of the hull around it are sought, and paths that begin as one of them and end as the
other: nearly the best of a long chain.

Of a chain of few layers the best path is seldom one of these, and is sought by labels.  A *label* is the
seconds and bytes of a path up to some layer, in some boundary state; of labels in one state that take about the same
memory, and of those that another beats in both, the fastest is kept (label setting for shortest paths with a resource:
Desrochers and Soumis, 1988).  The price of memory gives each label a lower bound to the end of the chain: seconds, and
the price of the bytes beyond the limit.  Labels that can't be faster than a path that is known go no further.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from autopar.search.chain.chain_dp import Chain, ChainLayer, path_costs
from autopar.search.chain.lagrangian import transient_caps

__all__ = ["SHORT_CHAIN", "limited_path"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# So many layers or fewer are a short chain: of longer ones labels take seconds.
SHORT_CHAIN = 8
# Equal parts of the memory that a path may take beyond the least; one label is kept for each of them and each state.
# On a decoder of 126 layers over 32 groups, twice as many give a step within 0.5 %, in one and a half times the time.
_PARTS = 256
_MAX_CAPS = 4  # as for the hull: a path whose transients need more than a cap is sought under the next
_PRICES = 12  # points of the hull that are looked at for the price: usually 3 to 6 are enough
_ROUNDING = 1e-12  # relative: of two sums that are equal but for that, neither is below the other
_DEAREST = 1e3  # the highest price: all memory costs so many times as much as all seconds


def limited_path(chain: Chain, limit_bytes: float) -> Indices | None:
    """About the fastest path of a chain without skips that takes at most so many bytes; None if there is none.

    Args:
        chain: the problem; candidates that others beat in seconds and bytes may be part of it.
        limit_bytes: of persistent bytes and the largest transient.
    """
    best_s, best = np.inf, None
    for cap in transient_caps(chain, _MAX_CAPS):
        search = _Search(chain, limit_bytes - chain.fixed_bytes - cap, cap, best_s)
        if search.allowed_bytes < search.smallest.sum():
            continue
        improved = search.run()
        if improved is not None:
            best_s, best = improved
    return best


@dataclass(frozen=True, eq=False)
class _Layer:
    """The candidates of a layer that may be the best, in the order of their ways through it.

    Args:
        rows: their places in the layer.
        time_s: their seconds.
        num_bytes: their persistent bytes.
        ways: the distinct ways, state before * states + state behind.
        starts: the first candidate of each way.
    """

    rows: Indices
    time_s: Array
    num_bytes: Array
    ways: Indices
    starts: Indices

    @classmethod
    def of(cls, layer: ChainLayer, cap_bytes: float, num_states: int) -> _Layer:
        """Those under a cap on transients."""
        rows = _undominated(layer, cap_bytes)
        ways = layer.state_in[rows] * num_states + layer.state_out[rows]
        order = np.argsort(ways, kind="stable")
        rows, (distinct, starts) = rows[order], np.unique(ways[order], return_index=True)
        return cls(rows, layer.time_s[rows], layer.persistent_bytes[rows], distinct, starts)

    def least(self, price: float, num_states: int) -> Array:
        """``[state before, state behind]``: the least seconds with memory at this price."""
        least = np.full(num_states * num_states, np.inf)
        least[self.ways] = np.minimum.reduceat(self.time_s + price * self.num_bytes, self.starts)
        return least.reshape(num_states, num_states)

    def cheapest(self, price: float, way: int) -> int:
        """The candidate that takes this way with the least seconds with memory at this price."""
        number = int(self.ways.searchsorted(way))
        stop = self.starts[number + 1] if number + 1 < len(self.starts) else len(self.rows)
        own = slice(self.starts[number], stop)
        return int(own.start + (self.time_s[own] + price * self.num_bytes[own]).argmin())


@dataclass(frozen=True, eq=False)
class _Point:
    """A path of the hull: its seconds and persistent bytes."""

    seconds: float
    num_bytes: float
    path: Indices

    def value_s(self, price: float) -> float:
        """Seconds, bytes paid for."""
        return self.seconds + price * self.num_bytes


@dataclass(eq=False)
class _Search:
    """One search: paths of at most `allowed_bytes` persistent bytes, transients under `cap_bytes`, below `most_s`."""

    chain: Chain
    allowed_bytes: float
    cap_bytes: float
    most_s: float
    layers: list[_Layer] = field(init=False)

    def __post_init__(self) -> None:
        states = self.chain.num_states
        known = {id(each): _Layer.of(each, self.cap_bytes, states) for each, _ in self.chain.distinct_layers}
        self.layers = [known[id(layer)] for layer in self.chain.layers]

    @cached_property
    def smallest(self) -> Array:
        """The least bytes of each layer."""
        return np.array([layer.num_bytes.min() if len(layer.rows) else np.inf for layer in self.layers])

    def run(self) -> tuple[float, Indices] | None:
        """Seconds and path of the fastest."""
        price, fitting, above = self._around_limit()
        known = None
        if fitting is not None and fitting.seconds < self.most_s:
            known = fitting.seconds, fitting.path
        if len(self.layers) <= SHORT_CHAIN:
            return self._by_labels(price, known)
        return known if fitting is None or above is None else self._mixed(fitting, above, known)

    def _mixed(
        self, fitting: _Point, above: _Point, known: tuple[float, Indices] | None
    ) -> tuple[float, Indices] | None:
        """The fastest that begins as one of two points of the hull and ends as the other, or what is known."""
        begins = np.arange(1, len(self.layers))[:, None] > np.arange(len(self.layers))
        one, other = fitting.path, above.path
        paths = np.concatenate([np.where(begins, one, other), np.where(begins, other, one)])
        costs = path_costs(self.chain, paths)
        seconds = costs[:, 0] - self.chain.fixed_s
        seconds[costs[:, 1] - self.chain.fixed_bytes > self.allowed_bytes] = np.inf
        best = int(seconds.argmin())
        best_s = self.most_s if known is None else known[0]
        return (float(seconds[best]), paths[best]) if seconds[best] < best_s else known

    def _by_labels(self, price: float, known: tuple[float, Indices] | None) -> tuple[float, Indices] | None:
        """The fastest by labels, with bounds by this price."""
        behind = self._behind(price)[2]
        best_s, best = (self.most_s, None) if known is None else known
        spare = self.allowed_bytes - float(self.smallest.sum())
        ends = self.allowed_bytes - (self.smallest.sum() - np.cumsum(self.smallest))
        seconds, size, state = np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.intp)
        came: list[tuple[Indices, Indices]] = []
        for index, (layer, own) in enumerate(zip(self.chain.layers, self.layers, strict=True)):
            state_in, state_out = layer.state_in[own.rows], layer.state_out[own.rows]
            reached_s = seconds[:, None] + own.time_s
            if index:
                reached_s = reached_s + self.chain.moves_s[index - 1][state[:, None], state_in]
            taken = size[:, None] + own.num_bytes
            least_s = reached_s + behind[index][state_out] + price * (taken - self.allowed_bytes)
            before, chosen = np.nonzero((taken <= ends[index]) & (least_s < best_s) & (reached_s < best_s))
            if not len(before):
                return None if best is None else (best_s, best)
            seconds, size, state = reached_s[before, chosen], taken[before, chosen], state_out[chosen]
            part = ((ends[index] - size) * (_PARTS / max(spare, 1.0))).astype(np.intp)
            kept = _fastest(seconds, -part, state)
            seconds, size, state = seconds[kept], size[kept], state[kept]
            came.append((before[kept], own.rows[chosen[kept]]))
        label = last = int(seconds.argmin())
        path = np.zeros(len(self.layers), dtype=np.intp)
        for index in range(len(self.layers) - 1, -1, -1):
            before, chosen = came[index]
            path[index] = chosen[label]
            label = int(before[label])
        return float(seconds[last]), path

    def _around_limit(self) -> tuple[float, _Point | None, _Point | None]:
        """Seconds per byte at which the fastest path takes about what is allowed, and the neighbors on the hull that
        do and don't fit, as far as there are any.

        Of two points of the hull, one of which fits, the price that makes both equal gives a point below the line
        between them, or says that they are neighbors.
        """
        price, above = 0.0, self._point(0.0)
        if above.num_bytes <= self.allowed_bytes:
            return price, above, None
        scale = sum(float(layer.time_s.max()) for layer in self.layers)
        price = _DEAREST * scale / max(self.allowed_bytes, 1.0)
        fitting = self._point(price)
        if fitting.num_bytes > self.allowed_bytes:
            return price, None, None
        for _ in range(_PRICES):
            price = max(0.0, fitting.seconds - above.seconds) / (above.num_bytes - fitting.num_bytes)
            own = self._point(price)
            if own.value_s(price) >= fitting.value_s(price) * (1 - _ROUNDING):
                break
            fitting, above = (own, above) if own.num_bytes <= self.allowed_bytes else (fitting, own)
        return price, fitting, above

    def _point(self, price: float) -> _Point:
        """The path of the least seconds with memory at this price."""
        least, entries, behind = self._behind(price)
        states, moves = self.chain.num_states, self.chain.moves_s
        path = np.zeros(len(self.layers), dtype=np.intp)
        seconds = num_bytes = 0.0
        state = int(entries[0].argmin())
        for index, (layer, own) in enumerate(zip(self.chain.layers, self.layers, strict=True)):
            if index:
                arrive_s = moves[index - 1][state] + entries[index]
                before, state = state, int(arrive_s.argmin())
                seconds += float(moves[index - 1][before, state])
            after = int((least[id(own)][state] + behind[index]).argmin())
            row = own.cheapest(price, state * states + after)
            seconds, num_bytes = seconds + float(own.time_s[row]), num_bytes + float(own.num_bytes[row])
            path[index] = own.rows[row]
            state = int(layer.state_out[path[index]])
        return _Point(seconds, num_bytes, path)

    def _behind(self, price: float) -> tuple[dict[int, Array], list[Array], list[Array]]:
        """With memory at this price, `_Layer.least` by id, and the least that the rest takes, by the state before each
        layer, and behind it.
        """
        states = self.chain.num_states
        least = {id(layer): layer.least(price, states) for layer in self.layers}
        entries, behind = list[Array](), [np.zeros(states)]
        for index in range(len(self.layers) - 1, -1, -1):
            entries.append((least[id(self.layers[index])] + behind[-1]).min(axis=1))
            if index:
                behind.append((self.chain.moves_s[index - 1] + entries[-1]).min(axis=1))
        return least, entries[::-1], behind[::-1]


def _undominated(layer: ChainLayer, cap_bytes: float) -> Indices:
    """The candidates under the cap that no other between the same states beats in seconds and persistent bytes."""
    rows = np.flatnonzero((layer.transient_bytes <= cap_bytes) & np.isfinite(layer.time_s))
    if not len(rows):
        return rows
    states = layer.state_in[rows] * (int(layer.state_out.max()) + 1) + layer.state_out[rows]
    return rows[_fastest(layer.time_s[rows], layer.persistent_bytes[rows], states)]


def _fastest(seconds: Array, size: Array | Indices, state: Indices) -> Indices:
    """Indices of those that no other in the same state beats in seconds and size."""
    order = np.lexsort((seconds, size, state))
    ordered_s, ordered_states = seconds[order], state[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered_states[1:] != ordered_states[:-1]]))
    # Ever slower by state, so that a running minimum starts anew with each.
    number = np.cumsum(np.bincount(starts, minlength=len(order))) - 1
    shifted = ordered_s - number * (float(np.ptp(seconds)) + 1.0)
    least = np.minimum.accumulate(np.concatenate([[np.inf], shifted]))[:-1]
    return order[shifted < least]
