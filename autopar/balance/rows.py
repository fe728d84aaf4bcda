"""Assigns sequences to rows of one length, equally many for each data-parallel rank, so that attention is balanced.

Rows are computed whole, so places without a token cost as much as others: the fewest rows that hold all sequences are
filled, and attention alone, which takes the squares of lengths, tells ranks apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from autopar.balance.assignment import Assignment
from autopar.balance.exact import FEW, improve_exactly
from autopar.balance.packing import Packed, Places, even_out, longest_first, tightest_rows, work_bound
from autopar.plan.prediction import RowCost

__all__ = ["assign_rows", "taken_places"]


def taken_places(row: RowCost, tokens: np.ndarray, *, packs: bool) -> np.ndarray:
    """``[n]`` places of a row that sequences of ``[n]`` `tokens` take; `packs`: several share a row."""
    return tokens if packs else np.full(len(tokens), row.tokens)


def assign_rows(
    row: RowCost, tokens: np.ndarray, devices: int, limit_bytes: float, *, packs: bool = True, batches: int = 1
) -> Assignment:
    """A place for every sequence in rows like `row`, which holds each of the ``[n]`` `tokens`.

    Args:
        row: the cost of a row, and how many data-parallel ranks share rows out.
        tokens: of each sequence.
        devices: of all ranks.
        limit_bytes: the memory of a device, which limits the rows of a microbatch.
        packs: whether several sequences share a row.
        batches: as in `BatchPlanner.assign`.
    """
    groups = row.ranks * batches
    taken = taken_places(row, tokens, packs=packs)
    work = row.pair_s * np.square(tokens.astype(np.float64))[None]
    for rows in _row_counts(row, taken, groups, limit_bytes):
        places = Places(np.zeros(groups, np.int64), rows, float(row.tokens), taken, work)
        bound_s = work_bound(places)
        packed = longest_first(places) or tightest_rows(places)
        is_exact = False
        if packed is not None:
            packed = even_out(places, packed, bound_s)
        if len(tokens) <= FEW:
            packed, is_exact = improve_exactly(places, packed, bound_s)
        if packed is not None:
            break
    else:
        raise AssertionError("a row for each sequence has room for all")
    if batches > 1:  # groups of a step wait for each other: those of like work meet
        packed = packed.renumbered(np.argsort(np.argsort(-packed.load, kind="stable"), kind="stable"))
    degrees = np.full(groups, devices // row.ranks)
    order = _heaviest_row_first(packed, places)
    at_once = row.at_once(rows, limit_bytes)
    return Assignment(tokens, packed.group, order, degrees, rows, packed.load, bound_s, is_exact, row, (), at_once)


def _row_counts(row: RowCost, taken: np.ndarray, groups: int, limit_bytes: float) -> Iterable[int]:
    """How many rows each rank could compute, from what they can't be below to enough for a row for each sequence:
    any number that a microbatch holds, else whole microbatches.
    """
    halves = int((2 * taken > row.tokens).sum())  # no two of these share a row
    least = max(1, math.ceil(int(taken.sum()) / row.tokens / groups), math.ceil(halves / groups))
    most = max(least, math.ceil(len(taken) / groups))
    sizes = ((count, row.at_once(count, limit_bytes)) for count in range(least, most + 1))
    return dict.fromkeys(-(-count // size) * size for count, size in sizes)


def _heaviest_row_first(packed: Packed, places: Places) -> np.ndarray:
    """``[n]`` rows, renumbered within each group: ranks that wait for each other in every microbatch (ZeRO-3) wait
    least if the heavy ones of all ranks meet.
    """
    groups, rows = packed.left.shape
    flat = packed.group * rows + packed.row
    work = np.bincount(flat, weights=places.work[0], minlength=groups * rows).reshape(groups, rows)
    rank = np.argsort(np.argsort(-work, axis=1, kind="stable"), axis=1, kind="stable")
    return rank.reshape(-1)[flat]
