"""Sequences into rows of groups, so that the group with the most work has as little as possible.

That is scheduling on machines, equal or of several kinds, with room for so many tokens in each of their rows.
It is hard in general; here the longest goes first to the group that would be done first (Graham's rule, at most a third
above the least if nothing but work counts), then sequences move or change places while that helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Packed", "Places", "even_out", "longest_first", "tightest_rows", "work_bound"]

# Exchanges tried: each takes work off the group with the most. 10,000 sequences on 4,096 groups end after fewer.
_EXCHANGES = 200
_ENOUGH = 1e-3  # of the largest work: what is closer to the bound is not worth an exchange


@dataclass(frozen=True, eq=False)
class Places:
    """What there is to fill.

    Args:
        kind: ``[groups]`` which row of `work` prices the group.
        rows: of each group.
        room: tokens of a row, of all groups or of each.
        tokens: ``[n]`` of each sequence.
        work: ``[kinds, n]`` seconds of each sequence on a group of each kind; infinite where it has no room.
    """

    kind: np.ndarray
    rows: int
    room: float | np.ndarray
    tokens: np.ndarray
    work: np.ndarray

    def seconds(self, index: int) -> np.ndarray:
        """Of a sequence on each group; ``[1]`` where all are of one kind."""
        return self.work[:, index] if len(self.work) == 1 else self.work[self.kind, index]

    @property
    def rooms(self) -> np.ndarray:
        """``[groups, rows]`` tokens."""
        return np.tile(np.broadcast_to(self.room, len(self.kind)).astype(np.float64)[:, None], self.rows)

    @property
    def order(self) -> np.ndarray:
        """The sequences, the most work first, equals as they came."""
        return np.lexsort((-self.tokens, -self.work.min(axis=0)))


@dataclass(eq=False)
class Packed:
    """A place for every sequence: ``[n]`` groups and rows, ``[groups]`` seconds, ``[groups, rows]`` tokens left."""

    group: np.ndarray
    row: np.ndarray
    load: np.ndarray
    left: np.ndarray

    @property
    def most_s(self) -> float:
        """Seconds of the group with the most work."""
        return float(self.load.max(initial=0.0))

    @classmethod
    def empty(cls, places: Places) -> Packed:
        """Nothing has a place yet."""
        count, groups = len(places.tokens), len(places.kind)
        return cls(np.full(count, -1), np.zeros(count, np.int64), np.zeros(groups), places.rooms)

    def put(self, places: Places, index: int, group: int, row: int) -> None:
        """Give a sequence its place."""
        self.group[index], self.row[index] = group, row
        self.left[group, row] -= places.tokens[index]
        self.load[group] += places.work[places.kind[group], index]

    def renumbered(self, numbers: np.ndarray) -> Packed:
        """The same with other names for groups: ``[groups]`` the new number of each."""
        back = np.argsort(numbers)
        return Packed(numbers[self.group], self.row, self.load[back], self.left[back])

    def take(self, places: Places, index: int) -> None:
        """Take it away again."""
        group, row = self.group[index], self.row[index]
        self.left[group, row] += places.tokens[index]
        self.load[group] -= places.work[places.kind[group], index]


def work_bound(places: Places) -> float:
    """No packing has a group with less than this as the most work: its mean, its largest sequence, and with one kind
    of groups two of the largest that must share one.
    """
    least = np.sort(places.work.min(axis=0))[::-1]
    groups = len(places.kind)
    if not len(least):
        return 0.0
    bound = max(float(least.sum()) / groups, float(least[0]))
    if len(places.work) == 1 and len(least) > groups:
        bound = max(bound, float(least[groups - 1] + least[groups]))
    return bound


def longest_first(places: Places) -> Packed | None:
    """Each sequence in the group that is done with it first, in the fullest row with room; None: one has none."""
    packed = Packed.empty(places)
    room = packed.left.max(axis=1)
    for index in places.order:
        tokens = places.tokens[index]
        done_s = packed.load + places.seconds(index)
        done_s[room < tokens] = np.inf
        group = int(done_s.argmin())
        if np.isinf(done_s[group]):
            return None
        left = packed.left[group]
        row = 0 if places.rows == 1 else int(np.where(left >= tokens, left, np.inf).argmin())
        packed.put(places, index, group, row)
        room[group] = left.max()
    return packed


def tightest_rows(places: Places) -> Packed | None:
    """As `longest_first`, but rows are filled for room alone (best fit), and then shared out among groups, which are
    all of one kind: where room is scarce.
    """
    left = places.rooms.reshape(-1)
    rows = np.zeros(len(places.tokens), np.int64)
    for index in np.argsort(-places.tokens, kind="stable"):
        fits = np.where(left >= places.tokens[index], left, np.inf)
        rows[index] = fits.argmin()
        if np.isinf(fits[rows[index]]):
            return None
        left[rows[index]] -= places.tokens[index]
    work = np.bincount(rows, weights=places.work[0], minlength=len(left))
    whole = Places(places.kind, places.rows, 1.0, np.ones(len(left)), work[None])
    shared = longest_first(whole)
    assert shared is not None  # as many rows as there are
    packed = Packed.empty(places)
    for index, row in enumerate(rows):
        packed.put(places, index, int(shared.group[row]), int(shared.row[row]))
    return packed


def even_out(places: Places, packed: Packed, bound_s: float) -> Packed:
    """Take work off the group with the most, by moving one of its sequences or exchanging two, while that helps."""
    for _ in range(_EXCHANGES):
        heavy = int(packed.load.argmax())
        if packed.load[heavy] <= bound_s * (1 + _ENOUGH) or not _improve(places, packed, heavy):
            break
    return packed


def _improve(places: Places, packed: Packed, heavy: int) -> bool:
    own = np.flatnonzero(packed.group == heavy)
    others = np.flatnonzero(packed.group != heavy)
    change = min((_best_move(places, packed, own), *_swaps(places, packed, own, others)), key=lambda each: each[0])
    largest_s, index, partner, target = change
    if largest_s >= packed.load[heavy] * (1 - 1e-12):
        return False
    if partner < 0:
        row = _row_with_room(packed, target, places.tokens[index])
        packed.take(places, index)
        packed.put(places, index, target, row)
        return True
    here, there = packed.row[index], packed.row[partner]
    packed.take(places, index)
    packed.take(places, partner)
    packed.put(places, index, target, there)
    packed.put(places, partner, heavy, here)
    return True


def _row_with_room(packed: Packed, group: int, tokens: float) -> int:
    left = packed.left[group]
    return int(np.where(left >= tokens, left, np.inf).argmin())


Change = tuple[float, int, int, int]  # the larger of both loads then, the sequence, its partner or -1, the other group


def _best_move(places: Places, packed: Packed, own: np.ndarray) -> Change:
    """One of `own`, which one group has, in another group."""
    heavy = packed.group[own[0]]
    room = packed.left.max(axis=1)
    best: Change = (np.inf, -1, -1, -1)
    for index in own:
        then_s = packed.load + places.seconds(index)
        then_s[room < places.tokens[index]] = np.inf
        then_s[heavy] = np.inf
        target = int(then_s.argmin())
        stays_s = packed.load[heavy] - places.work[places.kind[heavy], index]
        best = min(best, (float(max(then_s[target], stays_s)), int(index), -1, target))
    return best


def _swaps(places: Places, packed: Packed, own: np.ndarray, others: np.ndarray) -> list[Change]:
    """For each of `own`, which one group has, the best of `others` to take its place."""
    if not len(others):
        return []
    heavy = packed.group[own[0]]
    targets, tokens, kinds = packed.group[others], places.tokens[others], places.kind[packed.group[others]]
    room = packed.left[targets, packed.row[others]] + tokens
    changes: list[Change] = []
    for index in own:
        here = packed.load[heavy] - places.work[places.kind[heavy], index] + places.work[places.kind[heavy], others]
        there = packed.load[targets] - places.work[kinds, others] + places.work[kinds, index]
        fits = (room >= places.tokens[index]) & (packed.left[heavy, packed.row[index]] + places.tokens[index] >= tokens)
        largest_s = np.where(fits, np.maximum(here, there), np.inf)
        best = int(largest_s.argmin())
        changes.append((float(largest_s[best]), int(index), int(others[best]), int(targets[best])))
    return changes
