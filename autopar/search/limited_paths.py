"""The fastest path through a short chain within a memory limit, by labels.

`autopar.search.lagrangian` finds the paths on the convex hull of (bytes, seconds), which is all that a long chain
needs.  A device group of a pipeline has few layers, and its best path is seldom on the hull.  Here a *label* is the
seconds and bytes of a path up to some layer, in some boundary state; of labels in one state that take about the same
memory, and of those that another beats in both, the fastest is kept (label setting for shortest paths with a resource:
Desrochers and Soumis, 1988).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autopar.search.chain_dp import Chain, ChainLayer
from autopar.search.lagrangian import transient_caps

__all__ = ["limited_path"]

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

# Equal parts of the memory that a path may take beyond the least; one label is kept for each of them and each state.
# On a decoder of 126 layers over 32 groups, twice as many give a step within 0.5 %, in one and a half times the time.
_PARTS = 256
_MAX_CAPS = 4  # as for the hull: a path whose transients need more than a cap is sought under the next


def limited_path(chain: Chain, limit_bytes: float) -> Indices | None:
    """About the fastest path of a chain without skips that takes at most so many bytes; None if there is none.

    Args:
        chain: the problem; candidates that others beat in seconds and bytes may be part of it.
        limit_bytes: of persistent bytes and the largest transient.
    """
    best_s, best = np.inf, None
    for cap in transient_caps(chain, _MAX_CAPS):
        found = _Labels(chain, limit_bytes - chain.fixed_bytes - cap, cap, best_s).run()
        if found is not None:
            best_s, best = found
    return best


@dataclass(eq=False)
class _Labels:
    """One search: paths of at most `allowed_bytes` persistent bytes, transients under `cap_bytes`, below `most_s`."""

    chain: Chain
    allowed_bytes: float
    cap_bytes: float
    most_s: float
    _rows: dict[int, Indices] = field(default_factory=dict[int, Indices])

    def run(self) -> tuple[float, Indices] | None:
        """Seconds and path of the fastest."""
        layers = self.chain.layers
        for layer in layers:
            if id(layer) not in self._rows:
                self._rows[id(layer)] = _undominated(layer, self.cap_bytes)
        if not all(map(len, self._rows.values())):
            return None
        smallest = np.array([layer.persistent_bytes[self._rows[id(layer)]].min() for layer in layers])
        spare = self.allowed_bytes - float(smallest.sum())
        if spare < 0:
            return None
        ends = self.allowed_bytes - (smallest.sum() - np.cumsum(smallest))
        seconds, size, state = np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.intp)
        came: list[tuple[Indices, Indices]] = []
        for index, layer in enumerate(layers):
            rows = self._rows[id(layer)]
            reached_s = seconds[:, None] + layer.time_s[rows]
            if index:
                reached_s = reached_s + self.chain.moves_s[index - 1][state[:, None], layer.state_in[rows]]
            taken = size[:, None] + layer.persistent_bytes[rows]
            before, chosen = np.nonzero((taken <= ends[index]) & (reached_s < self.most_s))
            if not len(before):
                return None
            seconds, size, state = reached_s[before, chosen], taken[before, chosen], layer.state_out[rows][chosen]
            part = ((ends[index] - size) * (_PARTS / max(spare, 1.0))).astype(np.intp)
            kept = _fastest(seconds, -part, state)
            seconds, size, state = seconds[kept], size[kept], state[kept]
            came.append((before[kept], rows[chosen[kept]]))
        label = best = int(seconds.argmin())
        path = np.zeros(len(layers), dtype=np.intp)
        for index in range(len(layers) - 1, -1, -1):
            before, chosen = came[index]
            path[index] = chosen[label]
            label = int(before[label])
        return float(seconds[best]), path


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
