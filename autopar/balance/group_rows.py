"""Assigns a batch to device groups of different sizes, each of which computes rows of its own length.

A step takes as long as the slowest group, plus what all devices do once a step:

    coupling_s + max over groups g of (fill_s[g] + rows[g] * row_s[g] + pair_s[g] * sum(n ** 2 of its sequences))

where `fill_s`, the time to fill and drain the pipeline, is 0 without stages and for groups without rows.
For each way to form groups, sequences are assigned in descending order of length: each to the group that would finish
it first, into its fullest row with enough room, or a new row.  Where sequences don't share rows, each gets a row of its
own.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from autopar.balance.assignment import Assignment
from autopar.balance.groups import candidate_counts, devices_bound
from autopar.balance.nested_groups import NestedKind, nest_below
from autopar.plan.prediction import GroupRow, RowCost

__all__ = ["assign_groups"]

# Sequences placed in all trials, the first of which are most often the best: 8 microseconds each.  To begin a trial
# takes as long as to place some.
_PLACED, _BEGUN = 2500, 15
# How far the largest work may be above the bound: less is not worth the time to look for groups that overlap.
_WORTH_NESTING = 0.02


def assign_groups(
    kinds: Sequence[GroupRow],
    coupling_s: float,
    devices: int,
    tokens: np.ndarray,
    *,
    nests: bool = False,
    below_s: float = math.inf,
    packs: bool = True,
) -> Assignment | None:
    """The best assignment found to groups of at least two of these kinds, whose degrees fall; rows of the first hold
    every sequence; `devices` are those of a pipeline stage, if there are any.

    With `nests`, devices may be in several groups, one after the other.  `packs`: whether sequences share rows.

    None: no such groups have as many devices, or none were found with a step of less than `below_s` seconds.
    """
    lengths = tokens.astype(np.float64)
    work = np.array([
        np.where(
            tokens <= each.tokens,
            each.row_s * (lengths / each.tokens if packs else 1.0) + each.pair_s * lengths**2,
            np.inf,
        )
        for each in kinds
    ])  # fmt: skip
    degrees = np.array([each.degree for each in kinds])
    bound_s = devices_bound(work, degrees, devices)
    limit_s = below_s - coupling_s
    if bound_s >= limit_s:
        return None
    order = np.argsort(-tokens, kind="stable")
    best: Assignment | None = None
    spent = 0
    for counts in candidate_counts(work, degrees, devices):
        is_mixed = sum(count > 0 for count in counts) > 1 and int(np.dot(counts, degrees)) == devices
        if not is_mixed:
            continue
        if limit_s < math.inf and spent > _PLACED:
            break
        placed, group, row, load = _pack(kinds, counts, tokens, order, limit_s, packs=packs)
        spent += placed + _BEGUN
        if placed == len(tokens):
            groups = tuple(each for each, count in zip(kinds, counts, strict=True) for _ in range(count))
            rows = int(row.max(initial=-1)) + 1
            own = np.array([each.degree for each in groups])
            best = Assignment(
                tokens, group, row, own, rows, load, bound_s, False, RowCost(step_s=coupling_s), groups
            )  # fmt: skip
            limit_s = best.largest_s
    if nests and bound_s * (1 + _WORTH_NESTING) < limit_s < math.inf:
        own = [NestedKind(kind.degree, kind.tokens, kind.row_s, 0.0, kind.pair_s, kind.fill_s, packs) for kind in kinds]
        return _nested(kinds, own, coupling_s, devices, tokens, (bound_s, limit_s)) or best
    return best


def _nested(
    kinds: Sequence[GroupRow],
    own: Sequence[NestedKind],
    coupling_s: float,
    devices: int,
    tokens: np.ndarray,
    between_s: tuple[float, float],
) -> Assignment | None:
    """Groups that overlap, of at least two kinds (`own`: as they cost there), with less work than the second of
    `between_s`, of which the first is a lower bound; None: none were found.
    """
    bound_s, limit_s = between_s
    places = nest_below(own, devices, tokens, bound_s, limit_s)
    if places is None or (places.kind == places.kind[0]).all():
        return None
    numbers: list[int] = places.kind.tolist()
    groups = tuple(kinds[number] for number in numbers)
    return Assignment(
        tokens, places.group, places.row, np.array([kind.degree for kind in groups]),
        int(places.row.max(initial=-1)) + 1, places.work_s, bound_s, False, RowCost(step_s=coupling_s), groups,
        starts=tuple(places.start.tolist()), load_s=tuple(places.load_s.tolist()),
    )  # fmt: skip


def _pack(
    kinds: Sequence[GroupRow],
    counts: Sequence[int],
    tokens: np.ndarray,
    order: np.ndarray,
    limit_s: float,
    *,
    packs: bool = True,
) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Place sequences, in descending `order` of length, in so many groups of each kind.

    Returns how many have a place, fewer than n where a group would take `limit_s` or longer; ``[n]`` groups, ``[n]``
    rows of them, ``[groups]`` seconds.
    """
    sizes, row_s, pair_s, fill_s = (
        np.repeat([getattr(kind, name) for kind in kinds], counts) for name in ("tokens", "row_s", "pair_s", "fill_s")
    )
    tokens_of, another_s = sizes.tolist(), row_s.tolist()
    closed = sorted({kind.tokens for kind in kinds})
    load, room = [math.inf] * len(sizes), [0] * len(sizes)
    # `load`, and another row where none has room for the next sequence; those with too short rows are never chosen.
    before_s, done_s = np.full(len(sizes), np.inf), np.empty(len(sizes))
    full: list[tuple[int, int]] = []  # groups without such room, the most room first, and entries of some others
    left: list[list[tuple[int, int]]] = [[] for _ in sizes]  # of each row its room and its number, in order of room
    group, row = np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.int64)
    lengths = tokens.tolist()
    for placed, index in enumerate(order.tolist()):
        length = lengths[index]
        while closed and closed[-1] >= length:
            opened: np.ndarray = sizes == closed.pop()
            before_s[opened] = fill_s[opened] + row_s[opened]  # what it takes to fill a group comes with its first row
        while full and -full[0][0] >= length:
            own = heappop(full)[1]
            if room[own] >= length:
                before_s[own] = load[own]
        np.multiply(pair_s, float(length) ** 2, out=done_s)
        done_s += before_s
        own = int(done_s.argmin())
        own_s = float(done_s[own])
        if own_s >= limit_s:
            return placed, group, row, np.array(load)
        rows = left[own]
        fits = bisect_left(rows, (length, 0))
        size, place = rows.pop(fits) if fits < len(rows) else (tokens_of[own] if packs else length, len(rows))
        insort(rows, (size - length, place))
        load[own], room[own] = own_s, rows[-1][0]
        if room[own] >= length:  # lengths only fall
            before_s[own] = own_s
        else:
            before_s[own] = own_s + another_s[own]
            heappush(full, (-room[own], own))
        group[index], row[index] = own, place
    return len(tokens), group, row, np.where([bool(rows) for rows in left], load, 0.0)
