"""The lower convex hull of (bytes, seconds), followed by prices of memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["HullPoint", "follow_hull"]

T = TypeVar("T")

_ROUNDING = 1e-9  # relative: a point that is no further below the line between two others is on it


@dataclass(frozen=True, eq=False)
class HullPoint(Generic[T]):
    """The best choice at some price of a byte, with its bytes and seconds."""

    seconds: float
    num_bytes: float
    choice: T

    def value_s(self, price: float) -> float:
        """Seconds, bytes paid for."""
        return self.seconds + price * self.num_bytes


def follow_hull(
    best_at: Callable[[float], HullPoint[T]],
    dearest_s_per_byte: float,
    max_points: int,
    aim_bytes: float = -math.inf,
) -> dict[float, HullPoint[T]]:
    """Points of the hull by price, from 0 to the dearest.

    Between two points the next price is that of the line through them: what is best at it is below the line, or there
    is nothing between.

    Args:
        best_at: what has the least seconds, bytes paid for at a price; equal ones in any order.
        dearest_s_per_byte: a price at which bytes alone decide.
        max_points: the maximum number of points.
        aim_bytes: the bytes around which the hull is refined first; by default everywhere equally.
    """
    points = {0.0: best_at(0.0), dearest_s_per_byte: best_at(dearest_s_per_byte)}
    pairs = [(points[0.0], points[dearest_s_per_byte])]
    while pairs and len(points) < max_points:
        # The pair with the most memory between its ends first: there a missing point hurts most.
        pairs.sort(key=lambda pair: (pair[1].num_bytes <= aim_bytes <= pair[0].num_bytes, _saved(*pair)))
        fast, small = pairs.pop()
        saved = _saved(fast, small)
        price = (small.seconds - fast.seconds) / saved if saved > 0 else 0.0
        if price <= 0 or price in points:
            continue
        middle = points[price] = best_at(price)
        if middle.value_s(price) < fast.value_s(price) * (1 - _ROUNDING):
            pairs += [(fast, middle), (middle, small)]
    return points


def _saved(fast: HullPoint[T], small: HullPoint[T]) -> float:
    return fast.num_bytes - small.num_bytes
