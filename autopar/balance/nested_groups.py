"""Assigns a batch to device groups that overlap: a device computes rows with several others, then rows by itself.

A group of d devices begins at a multiple of d, so of two groups one contains the other, or they share no device.  Each
device computes the rows of all groups that it is in, those of larger groups first.  Then the devices of a group have
computed the same rows before, and none waits for another.  So the step takes as long as the device with the most work:

    max over devices of the sum over its groups g of (fill_s[g] + rows[g] * row_s[g] + seconds of the sequences of g)

where `fill_s`, in which the stages of a pipeline fill and drain, is 0 for groups without rows.

The assignment is a search for a target time, as in bin packing: in descending order of length, each sequence gets the
place that costs the fewest device seconds with which all devices still meet the target, on the devices with the most
work.  The target is halved between the lower bound and the best known.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["NestedKind", "NestedPlaces", "nest", "nest_below"]

# Targets: an eighth of what groups that stay for the step leave above the bound.  Of more sequences than `_QUICK`, for
# which a target takes milliseconds, these are tried only if one that is as close to the best known can be met.
_TRIALS, _QUICK = 3, 256
# Sequences times groups to compare them with, in all trials: about 10 ms, which a batch can be late by.  Twice as many
# make steps with many short sequences 0.2 to 0.4 % faster.  Whatever has to be done for a sequence takes as long as to
# compare it with so many groups.
_COMPARED, _EACH = 1_000_000, 1000


@dataclass(frozen=True)
class NestedKind:
    """One kind of group, as it costs here.

    Args:
        degree: devices of a group.
        tokens: the room of a row.
        row_s: seconds of a row, whatever is in it.
        token_s: seconds per token.
        pair_s: seconds per pair of tokens of one sequence.
        fill_s: seconds that a group with any row needs in addition.
        packs: whether sequences share rows.
    """

    degree: int
    tokens: float
    row_s: float
    token_s: float
    pair_s: float
    fill_s: float = 0.0
    packs: bool = True

    def seconds(self, lengths: np.ndarray) -> np.ndarray:
        """``[n]`` lengths -> seconds of each in a row that is there already; infinite where it does not fit."""
        return np.where(lengths <= self.tokens, self.token_s * lengths + self.pair_s * lengths**2, np.inf)

    def with_row(self, lengths: np.ndarray) -> np.ndarray:
        """The same with its share of the row, which is all of it if sequences don't share rows."""
        return self.seconds(lengths) + self.row_s * (lengths / self.tokens if self.packs else 1.0)


@dataclass(frozen=True, eq=False)
class NestedPlaces:
    """Where sequences are.

    Args:
        kind: ``[groups]`` the number of each group's kind, those with a sequence only.
        start: ``[groups]`` the first device of each.
        group: ``[n]`` the group of each sequence.
        row: ``[n]`` its row, counted within the group.
        work_s: ``[groups]`` seconds of each group.
        load_s: ``[devices]`` seconds of each device.
        rows: ``[devices]`` rows of each device, in all of its groups.
    """

    kind: np.ndarray
    start: np.ndarray
    group: np.ndarray
    row: np.ndarray
    work_s: np.ndarray
    load_s: np.ndarray
    rows: np.ndarray

    @property
    def largest_s(self) -> float:
        """Seconds of the device with the most work."""
        return float(self.load_s.max(initial=0.0))


def nest_below(
    kinds: Sequence[NestedKind], devices: int, tokens: np.ndarray, bound_s: float, limit_s: float
) -> NestedPlaces | None:
    """The best places found that take less than `limit_s`; None: none were found.  Nothing takes less than `bound_s`.

    `kinds` by falling degree; each degree divides the one before it and `devices`.
    """
    compared = len(tokens) * (_EACH + sum(devices // kind.degree for kind in kinds))
    trials = min(_TRIALS, _COMPARED // max(1, compared))
    best: NestedPlaces | None = None
    if trials and len(tokens) > _QUICK:
        best = nest(kinds, devices, tokens, limit_s - (limit_s - bound_s) / 2**_TRIALS)
        if best is None:
            return None
        limit_s = best.largest_s
    for _ in range(trials):
        target_s = (bound_s + limit_s) / 2
        places = nest(kinds, devices, tokens, target_s)
        if places is None:
            bound_s = target_s
        else:
            best, limit_s = places, places.largest_s
    return best


def nest(
    kinds: Sequence[NestedKind], devices: int, tokens: np.ndarray, target_s: float, most_rows: int = 0
) -> NestedPlaces | None:
    """Places with which no device takes longer than `target_s`, or has more than `most_rows` rows (0: any number);
    None: none were found.
    """
    filling = _Filling(kinds, devices, tokens.astype(np.float64), target_s, most_rows or len(tokens))
    is_done = all(filling.place(int(index)) for index in np.argsort(-tokens, kind="stable"))
    return filling.places() if is_done else None


class _Filling:
    """Groups while sequences are placed in them, one after the other.

    Attributes:
        load_s: ``[devices]``.
        rows: ``[devices]`` in all groups of a device.
        room: of each kind, ``[groups]`` tokens left in the emptiest row of each group.
        spare_s: device seconds that are left over if all sequences are where they are cheapest from here on.
        least_s: of each kind, what its group with the least work has had at least, when none could take a sequence.
            Work only grows, so that a sequence for which this is too much need not be compared with the groups.
        most_room: of each kind, no less than the largest `room`; as large when no group could take a sequence.
        fill_s: of each kind, ``[groups]`` what the first row of a group needs in addition; 0 once it is there.
    """

    def __init__(
        self, kinds: Sequence[NestedKind], devices: int, lengths: np.ndarray, target_s: float, most_rows: int
    ) -> None:
        self.kinds, self.lengths, self.target_s, self.most_rows = kinds, lengths.tolist(), target_s, most_rows
        counts = [devices // kind.degree for kind in kinds]
        self.load_s, self.rows = np.zeros(devices), np.zeros(devices, np.int64)
        self.room, self.work = ([np.zeros(count) for count in counts] for _ in range(2))
        # Of each row of a group its room and its number, in order of room.
        self.left: list[list[list[tuple[float, int]]]] = [[[] for _ in range(count)] for count in counts]
        self.least_s, self.most_room = [0.0] * len(kinds), [0.0] * len(kinds)
        self.fill_s = [np.full(count, kind.fill_s) for count, kind in zip(counts, kinds, strict=True)]
        degrees = np.array([[kind.degree] for kind in kinds])
        seconds = np.array([kind.seconds(lengths) for kind in kinds])
        shared = np.array([kind.with_row(lengths) for kind in kinds]) * degrees
        # Rows that are there already come first where both cost the same.
        order = np.argsort(np.concatenate([seconds * degrees, shared]), axis=0, kind="stable")
        least = shared.min(axis=0, initial=np.inf)
        self.spare_s = devices * target_s - float(least.sum())
        self.order: list[list[int]] = order.T.tolist()
        self.seconds: list[list[float]] = seconds.T.tolist()
        # What a sequence takes in a kind of group above the least, with its share of a row: nothing is less than that.
        self.more_s: list[list[float]] = (shared - least).T.tolist()
        self.at = np.zeros((len(lengths), 3), np.int64)  # of each sequence: kind, place among its groups, row

    def place(self, index: int) -> bool:
        """Whether the sequence has a place, which it gets."""
        length, seconds = self.lengths[index], self.seconds[index]
        for choice in self.order[index]:
            is_new, kind = divmod(choice, len(self.kinds))
            taken_s = seconds[kind] + (self.kinds[kind].row_s if is_new else 0.0)
            is_hopeless = self.least_s[kind] + taken_s > self.target_s or not (is_new or length <= self.most_room[kind])
            own = -1 if is_hopeless else self._most_loaded(kind, length, taken_s, is_new=bool(is_new))
            if own >= 0:
                self._put(index, kind, own, taken_s, is_new=bool(is_new))
                self.spare_s -= self.more_s[index][kind]
                return self.spare_s >= 0
        return False

    def _most_loaded(self, kind: int, length: float, taken_s: float, *, is_new: bool) -> int:
        """The group of this kind with the most work that can take it; -1: there is none."""
        degree = self.kinds[kind].degree
        load_s = self.load_s if degree == 1 else self.load_s.reshape(-1, degree).max(axis=1)
        has_fill = is_new and self.kinds[kind].fill_s > 0
        fits = (load_s + self.fill_s[kind] if has_fill else load_s) <= self.target_s - taken_s
        if not is_new:
            fits &= self.room[kind] >= length
        elif self.most_rows < len(self.lengths):
            fits &= self.rows.reshape(-1, degree).max(axis=1) < self.most_rows
        group = int(np.where(fits, load_s, -1.0).argmax())
        if fits[group]:
            return group
        self.least_s[kind] = float(load_s.min())
        self.most_room[kind] = float(self.room[kind].max())
        return -1

    def _put(self, index: int, kind: int, own: int, taken_s: float, *, is_new: bool) -> None:
        degree, left, room = self.kinds[kind].degree, self.left[kind][own], self.room[kind]
        devices = slice(own * degree, (own + 1) * degree)
        length = self.lengths[index]
        fits = len(left) if is_new else bisect_left(left, (length, 0))
        room_of_row = float(self.kinds[kind].tokens) if self.kinds[kind].packs else length
        size, row = (room_of_row, len(left)) if is_new else left.pop(fits)
        insort(left, (size - length, row))
        room[own] = left[-1][0]
        self.most_room[kind] = max(self.most_room[kind], left[-1][0])
        if is_new:
            self.rows[devices] += 1
            taken_s += float(self.fill_s[kind][own])
            self.fill_s[kind][own] = 0.0
        self.load_s[devices] += taken_s
        self.work[kind][own] += taken_s
        self.at[index] = kind, own, row

    def places(self) -> NestedPlaces:
        """What was placed."""
        groups, group = np.unique(self.at[:, :2], axis=0, return_inverse=True)
        degrees = np.array([kind.degree for kind in self.kinds])
        work = np.concatenate([self.work[number][groups[groups[:, 0] == number, 1]] for number in range(len(degrees))])
        kind = groups[:, 0]
        return NestedPlaces(
            kind, groups[:, 1] * degrees[kind], group.reshape(-1), self.at[:, 2], work, self.load_s, self.rows
        )
