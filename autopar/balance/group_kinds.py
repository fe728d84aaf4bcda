"""Chooses the row lengths of device groups.

Rows are computed including their padding, so with more lengths to choose from, groups wait less for each other.
A group of half as many devices has rows half as long.  Rows of lengths in between reuse the decisions of the next
longer rows, so each costs a trace but no search.  Of all candidates, those that expected batches would use are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopar.balance.group_rows import assign_groups
from autopar.plan.prediction import GroupRow

__all__ = ["kinds_worth_having", "with_more_lengths"]

_MOST_KINDS = 8  # each is a program that every rank traces and lowers
_LEAST_USE = 0.03  # of the devices' time: rows that are used less are not worth a program


def with_more_lengths(kinds: Sequence[GroupRow]) -> tuple[GroupRow, ...]:
    """`kinds`, the largest groups and longest rows first, rows of three quarters of their lengths, and of a half and a
    quarter of the shortest; prices of these are in proportion.

    By such prices, of Wikipedia's lengths on 8 to 64 devices, the group with the most work has 3 to 14 % less of it.
    """
    by_tokens = {kind.tokens: kind for kind in kinds}
    for kind in (*kinds, *_halves(kinds[-1])):
        by_tokens.setdefault(kind.tokens, kind)
        if kind.tokens % 4 == 0:
            own = _cut(kind, kind.tokens * 3 // 4)
            by_tokens.setdefault(own.tokens, own)
    return tuple(sorted(by_tokens.values(), key=lambda kind: (-kind.degree, -kind.tokens)))


def kinds_worth_having(
    kinds: Sequence[GroupRow], devices: int, batches: Sequence[np.ndarray], *, packs: bool = True
) -> tuple[GroupRow, ...]:
    """Those of `kinds` that steps of `batches` (each ``[n]`` lengths) would use, the first one in any case.

    `packs`: whether sequences share rows.
    """
    spent_s = dict.fromkeys(kinds, 0.0)
    for batch in batches:
        assignment = assign_groups(kinds, 0.0, devices, batch, packs=packs)
        if assignment is not None:
            for kind, work_s in zip(assignment.unlike, assignment.work_s, strict=True):
                spent_s[kind] += kind.degree * float(work_s)
    total_s = sum(spent_s.values())
    used = sorted(kinds[1:], key=lambda kind: -spent_s[kind])[: _MOST_KINDS - 1]
    return tuple(kind for kind in kinds if kind is kinds[0] or (kind in used and spent_s[kind] >= _LEAST_USE * total_s))


def _halves(kind: GroupRow) -> Iterator[GroupRow]:
    """Rows half and a quarter as long."""
    for _ in range(2):
        if kind.tokens % 2:
            return
        kind = _cut(kind, kind.tokens // 2)
        yield kind


def _cut(kind: GroupRow, tokens: int) -> GroupRow:
    return replace(kind, tokens=tokens, row_s=kind.row_s * tokens / kind.tokens)
