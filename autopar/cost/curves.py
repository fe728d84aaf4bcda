"""Curves of seconds over an amount of work, through measured points."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

from autopar.errors import MissingPriceError

__all__ = ["Curve", "Point"]


@dataclass(frozen=True, order=True)
class Point:
    """One measurement: `amount` of work (flops or bytes) took `seconds` (a median); `spread` is (q3-q1)/median."""

    amount: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Seconds over an amount of work, through measured points in order of amount.

    Between points it is a straight line in logarithms; below the first it stays (overhead), above the last it grows
    in proportion.  It never falls: a point that is faster than a smaller one is lifted to it.

    Args:
        points: the measurements, of positive amount.
        date: when they were taken, ISO 8601; ``""``: not known.
    """

    points: tuple[Point, ...]
    date: str = ""
    _logs: tuple[tuple[float, ...], tuple[float, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prepare the interpolation.

        Raises:
            MissingPriceError: there is no point, or one is not positive.
        """
        ordered = sorted(self.points)
        if not ordered or any(p.amount <= 0 or not 0 < p.seconds < math.inf for p in ordered):
            raise MissingPriceError(f"a curve needs points of positive amount and seconds, got {self.points}")
        amounts = tuple(math.log(p.amount) for p in ordered)
        highest = [ordered[0].seconds]
        for point in ordered[1:]:
            highest.append(max(highest[-1], point.seconds))
        object.__setattr__(self, "points", tuple(ordered))
        object.__setattr__(self, "_logs", (amounts, tuple(math.log(s) for s in highest)))

    def seconds(self, amount: float) -> float:
        """Seconds of `amount` of work."""
        amounts, seconds = self._logs
        if amount <= self.points[0].amount:
            return math.exp(seconds[0])
        at = math.log(amount)
        if at >= amounts[-1]:
            return math.exp(seconds[-1] + at - amounts[-1])
        right = bisect_right(amounts, at)
        left = right - 1
        part = (at - amounts[left]) / (amounts[right] - amounts[left])
        return math.exp(seconds[left] + part * (seconds[right] - seconds[left]))

    @property
    def overhead_s(self) -> float:
        """Seconds of the smallest amount."""
        return math.exp(self._logs[1][0])

    @property
    def spread(self) -> float:
        """The median spread of the points."""
        spreads = sorted(point.spread for point in self.points)
        return spreads[len(spreads) // 2]
