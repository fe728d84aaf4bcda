"""The best packing of a few sequences, by trying all that could be better than the best so far."""

from __future__ import annotations

import numpy as np

from autopar.balance.packing import Packed, Places

__all__ = ["FEW", "improve_exactly"]

FEW = 10  # sequences: of 10 there are at most 115,975 partitions, of which bounds leave some hundreds
_STEPS = 20_000  # places tried, about 20 ms: where bounds leave more, the best so far stays


class _DepthFirst:
    """Depth first, sequences in the order of `Places.order`; equal groups and rows are tried once."""

    def __init__(self, places: Places, best_s: float) -> None:
        self.places = places
        self.order = [int(index) for index in places.order]
        self.kind = [int(kind) for kind in places.kind]
        self.work = places.work.tolist()
        self.tokens = places.tokens.tolist()
        self.load = [0.0] * len(self.kind)
        self.left = places.rooms.tolist()
        self.path: list[tuple[int, int]] = []
        self.best_s = best_s
        self.best: list[tuple[int, int]] = []
        self.steps = 0

    def run(self) -> None:
        """Fill `best` with places for all of `order`, if some are better than `best_s`."""
        if len(self.path) == len(self.order):
            self.best_s, self.best = max(self.load), list(self.path)
            return
        index = self.order[len(self.path)]
        tried: set[tuple[object, ...]] = set()
        for group, kind in enumerate(self.kind):
            state = (kind, self.load[group], *sorted(self.left[group]))
            load = self.load[group] + self.work[kind][index]
            if state in tried or load >= self.best_s * (1 - 1e-12):
                continue
            tried.add(state)
            self._try_rows(index, group, load)
            if self.steps > _STEPS:
                return

    def _try_rows(self, index: int, group: int, load: float) -> None:
        before, tokens, left = self.load[group], self.tokens[index], self.left[group]
        self.load[group] = load
        for row in {room: row for row, room in enumerate(left) if room >= tokens}.values():
            self.steps += 1
            if load >= self.best_s * (1 - 1e-12):  # a row before this one led to a better best
                break
            left[row] -= tokens
            self.path.append((group, row))
            self.run()
            self.path.pop()
            left[row] += tokens
        self.load[group] = before


def improve_exactly(places: Places, packed: Packed | None, bound_s: float = 0.0) -> tuple[Packed | None, bool]:
    """The best packing, and whether it is known to be: `packed` if none is better; None if nothing fits.

    Args:
        places: with at most `FEW` sequences this is fast.
        packed: to improve; None: none is known.
        bound_s: as `work_bound` says.
    """
    best_s = np.inf if packed is None else float(packed.load.max())
    if packed is not None and best_s <= bound_s * (1 + 1e-12):
        return packed, True
    search = _DepthFirst(places, best_s)
    search.run()
    if search.best:
        packed = Packed.empty(places)
        for index, (group, row) in zip(search.order, search.best, strict=True):
            packed.put(places, index, group, row)
    return packed, search.steps <= _STEPS
