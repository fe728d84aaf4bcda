"""A `Probe` measures the points of one or more curves (or readings) of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Measurement", "Probe", "Sample"]


@dataclass(frozen=True)
class Sample:
    """A median in seconds, and the interquartile range relative to it."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Measurement:
    """The time of an `amount` of work: a point of the profile's curve `key`."""

    key: str
    amount: float
    sample: Sample


@dataclass(frozen=True)
class Probe:
    """A measurement to make; keys and amounts are the same on every rank.

    Args:
        keys: the curves (or readings) of the profile that it measures.
        num_points: the number of points of each of them.  A curve with fewer points was measured in less detail.
        measure: takes the approximate seconds to spend, and measures; nothing is allocated before.
        share: its share of the seconds to spend, relative to other probes.
        is_local: it never waits for other ranks, so that a failure on one rank can be reported to the others.
        is_reading: its values aren't seconds of work but readings (`autopar.cost.profile.Readings`).
    """

    keys: tuple[str, ...]
    num_points: int
    measure: Callable[[float], Iterator[Measurement]]
    share: float = 1.0
    is_local: bool = True
    is_reading: bool = False
