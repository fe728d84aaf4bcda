"""What can be measured alone: a `Probe` gives the points of a few curves (or readings) of the profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Measurement", "Probe", "Sample"]


@dataclass(frozen=True)
class Sample:
    """A median of seconds, and the distance of the quartiles relative to it."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Measurement:
    """`amount` of work took `taken`; `key` names the curve of the profile."""

    key: str
    amount: float
    taken: Sample


@dataclass(frozen=True)
class Probe:
    """Something to measure; keys and amounts are the same on every rank.

    Args:
        keys: the curves (or readings) of the profile that it gives.
        num_points: how many points each of them gets.  A curve with fewer was measured in less detail.
        measure: takes seconds to spend, about, and measures; nothing is allocated before.
        share: of the seconds to spend, relative to other probes.
        is_local: nothing in it waits for other ranks, so that one rank's failure can be told to the others.
        is_reading: its values are not seconds of work but readings (`autopar.cost.profile.Readings`).
    """

    keys: tuple[str, ...]
    num_points: int
    measure: Callable[[float], Iterator[Measurement]]
    share: float = 1.0
    is_local: bool = True
    is_reading: bool = False
