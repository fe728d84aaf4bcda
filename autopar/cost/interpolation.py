"""Seconds between sizes that were measured."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

__all__ = ["around", "between", "between_affine"]


def around(known: Sequence[int], size: int) -> tuple[tuple[int, float], ...]:
    """The neighbours of `size` among `known`, which are in order, with their shares; beyond them the last one."""
    right = bisect_right(known, size)
    if right == 0:
        return ((known[0], 1.0),)
    if right == len(known):
        return ((known[-1], 1.0),)
    low, high = known[right - 1], known[right]
    share = math.log(size / low) / math.log(high / low)
    return ((low, 1.0 - share), (high, share))


def between(known: Sequence[int], size: int, seconds: Callable[[int], float]) -> float:
    """`seconds` of `size`, whose logarithm is taken to be linear in that of the size between those that are known."""
    return math.exp(sum(share * math.log(seconds(neighbour)) for neighbour, share in around(known, size)))


def between_affine(known: Sequence[int], size: int, seconds: Callable[[int], float]) -> float:
    """`seconds` of `size`, between known sizes a constant and a part in proportion to the size."""
    right = bisect_right(known, size)
    if right in (0, len(known)):
        return seconds(known[min(right, len(known) - 1)])
    low, high = known[right - 1], known[right]
    share = (size - low) / (high - low)
    return (1.0 - share) * seconds(low) + share * seconds(high)
