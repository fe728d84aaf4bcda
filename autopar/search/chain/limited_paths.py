"""The fastest path through a short chain within a memory limit, by labels.

`autopar.search.chain.lagrangian` finds the paths on the convex hull of (bytes, seconds), which is all that a long chain
needs.  A device group of a pipeline has few layers, and its best path is seldom on the hull.  Here a *label* is the
seconds and bytes of a path up to some layer, in some boundary state; of labels in one state that take about the same
memory, and of those that another beats in both, the fastest is kept (label setting for shortest paths with a resource:
Desrochers and Soumis, 1988).

A price of memory gives each label a lower bound to the end of the chain: seconds, and the price of the bytes
beyond the limit.  Labels that can't be faster than a path that is known go no further.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.search.chain.chain_dp import Chain, ChainLayer
from autopar.search.chain.lagrangian import transient_caps

__all__ = ["limited_path"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

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
        labels = _Labels(chain, limit_bytes - chain.fixed_bytes - cap, cap, best_s)
        if labels.allowed_bytes < labels.smallest.sum():
            continue
        improved = labels.run()
        if improved is not None:
            best_s, best = improved
    return best


@dataclass(eq=False)
class _Labels:
    """One search: paths of at most `allowed_bytes` persistent bytes, transients under `cap_bytes`, below `most_s`."""

    chain: Chain
    allowed_bytes: float
    cap_bytes: float
    most_s: float
    _rows: dict[int, Indices] = field(default_factory=dict[int, Indices])
    smallest: Array = field(init=False)

    def __post_init__(self) -> None:
        for layer in self.chain.layers:
            if id(layer) not in self._rows:
                self._rows[id(layer)] = _undominated(layer, self.cap_bytes)
        sizes = (layer.persistent_bytes[self._rows[id(layer)]] for layer in self.chain.layers)
        self.smallest = np.array([own.min() if len(own) else np.inf for own in sizes])

    def run(self) -> tuple[float, Indices] | None:
        """Seconds and path of the fastest."""
        price, known = self._best_price()
        behind = self._behind(price)[1]
        best_s, best = (self.most_s, None) if known is None else known
        layers = self.chain.layers
        spare = self.allowed_bytes - float(self.smallest.sum())
        ends = self.allowed_bytes - (self.smallest.sum() - np.cumsum(self.smallest))
        seconds, size, state = np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.intp)
        came: list[tuple[Indices, Indices]] = []
        for index, layer in enumerate(layers):
            rows = self._rows[id(layer)]
            reached_s = seconds[:, None] + layer.time_s[rows]
            if index:
                reached_s = reached_s + self.chain.moves_s[index - 1][state[:, None], layer.state_in[rows]]
            taken = size[:, None] + layer.persistent_bytes[rows]
            least_s = reached_s + behind[index][layer.state_out[rows]] + price * (taken - self.allowed_bytes)
            before, chosen = np.nonzero((taken <= ends[index]) & (least_s < best_s) & (reached_s < best_s))
            if not len(before):
                return None if best is None else (best_s, best)
            seconds, size, state = reached_s[before, chosen], taken[before, chosen], layer.state_out[rows][chosen]
            part = ((ends[index] - size) * (_PARTS / max(spare, 1.0))).astype(np.intp)
            kept = _fastest(seconds, -part, state)
            seconds, size, state = seconds[kept], size[kept], state[kept]
            came.append((before[kept], rows[chosen[kept]]))
        label = last = int(seconds.argmin())
        path = np.zeros(len(layers), dtype=np.intp)
        for index in range(len(layers) - 1, -1, -1):
            before, chosen = came[index]
            path[index] = chosen[label]
            label = int(before[label])
        return float(seconds[last]), path

    def _best_price(self) -> tuple[float, tuple[float, Indices] | None]:
        """Seconds per byte at which the fastest path takes about what is allowed; seconds and path of the fastest on
        the hull that fits, if it is better than what is known.

        Of two points of the hull, one of which fits, the price that makes both equal gives a point below the line
        between them, or says that they are neighbors.
        """

        def point(price: float) -> tuple[float, float, Indices]:
            path, _ = self._behind(price)
            return *self._cost(path), path

        price, above = 0.0, point(0.0)
        if above[1] <= self.allowed_bytes:
            return price, self._if_better(above)
        scale = sum(float(layer.time_s[self._rows[id(layer)]].max()) for layer in self.chain.layers)
        price = _DEAREST * scale / max(self.allowed_bytes, 1.0)
        fitting = point(price)
        if fitting[1] > self.allowed_bytes:
            return price, None
        for _ in range(_PRICES):
            price = max(0.0, fitting[0] - above[0]) / (above[1] - fitting[1])
            own = point(price)
            if own[0] + price * own[1] >= (fitting[0] + price * fitting[1]) * (1 - _ROUNDING):
                break
            fitting, above = (own, above) if own[1] <= self.allowed_bytes else (fitting, own)
        return price, self._if_better(fitting)

    def _if_better(self, point: tuple[float, float, Indices]) -> tuple[float, Indices] | None:
        """Seconds and path of a point of the hull, if it is faster than what is known."""
        seconds, _, path = point
        return (seconds, path) if seconds < self.most_s else None

    def _behind(self, price: float) -> tuple[Indices, list[Array]]:
        """The path of the least seconds with memory at this price; per layer and state behind it the least that the
        rest takes.
        """
        layers, states = self.chain.layers, self.chain.num_states
        behind: list[Array] = [np.zeros(states)]
        choices: list[tuple[Indices, Indices]] = []
        for index in range(len(layers) - 1, -1, -1):
            layer, rows = layers[index], self._rows[id(layers[index])]
            value = layer.time_s[rows] + price * layer.persistent_bytes[rows] + behind[0][layer.state_out[rows]]
            order = np.argsort(value, kind="stable")[::-1]
            least, which = np.full(states, np.inf), np.zeros(states, dtype=np.intp)
            least[layer.state_in[rows[order]]] = value[order]  # where an index repeats, the last assignment stays
            which[layer.state_in[rows[order]]] = rows[order]
            if index:
                total = self.chain.moves_s[index - 1] + least
                choices.insert(0, (which, total.argmin(axis=1)))
                behind.insert(0, total.min(axis=1))
            else:
                choices.insert(0, (which, np.full(states, int(least.argmin()))))
        path, state = np.zeros(len(layers), dtype=np.intp), 0
        for index, (which, entry) in enumerate(choices):
            path[index] = which[entry[state]]
            state = int(layers[index].state_out[path[index]])
        return path, behind

    def _cost(self, path: Indices) -> tuple[float, float]:
        """Seconds and persistent bytes."""
        seconds = size = 0.0
        for index, (layer, row) in enumerate(zip(self.chain.layers, path.tolist(), strict=True)):
            seconds, size = seconds + float(layer.time_s[row]), size + float(layer.persistent_bytes[row])
            if index:
                before = self.chain.layers[index - 1].state_out[path[index - 1]]
                seconds += float(self.chain.moves_s[index - 1][before, layer.state_in[row]])
        return seconds, size


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
