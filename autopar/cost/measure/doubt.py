"""Which numbers of a profile to take again: those of a machine that was busy, or noisy."""

from __future__ import annotations

import time
from datetime import datetime

from autopar.cost.measure.collectives import Ranks, max_over_ranks
from autopar.cost.measure.timing import contention_now
from autopar.cost.profile import Curve, Profile, Readings

__all__ = ["NOISY", "doubtful_keys"]

_OLD_S = 600.0
"""Younger numbers are not doubted: what made the machine busy may well go on."""
_BUSIER = 1.5
NOISY = 0.5


def doubtful_keys(ranks: Ranks, found: Profile) -> frozenset[str]:
    """Keys of `found` that are more than 10 minutes old, and were measured while the machine was 1.5 times busier than
    it is now, or whose points have quartiles further apart than half of the median; the same on every rank."""
    [now_s] = max_over_ranks(ranks, [time.time()])
    old = {key: series for key, series in {**found.curves, **found.readings}.items() if _age_s(series, now_s) > _OLD_S}
    if not old:
        return frozenset()
    [contention] = max_over_ranks(ranks, [contention_now(ranks.device)])
    return frozenset(
        key
        for key, series in old.items()
        if series.contention > _BUSIER * contention or (isinstance(series, Curve) and series.spread > NOISY)
    )


def _age_s(series: Curve | Readings, now_s: float) -> float:
    try:
        return now_s - datetime.fromisoformat(series.date).timestamp()
    except (ValueError, OverflowError):  # there is no date, or none that a clock knows
        return float("inf")
