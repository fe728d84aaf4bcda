"""A profile: what was measured on real devices and links, as curves of seconds over work.  Plain data,
readable JSON.

The keys of `Profile.curves`:

=================================  ====================================================
``matmul/<dtype>/forward``         seconds over flops; so ``backward`` (both gradients)
``attention/<dtype>/forward``      seconds over flops; so ``backward``
``op/<packet>/forward``            seconds over bytes moved; so ``backward``
``elementwise/forward``            the same for any other op; so ``backward``
``view/forward``                   one point: seconds of an op that moves nothing; so ``backward``
``optimizer``                      seconds over bytes moved
``collective/<kind>/<n>/<stride>`` seconds over the NCCL tests' "size", on ``Axis(n, stride)``
=================================  ====================================================
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from autopar.errors import MissingPriceError
from autopar.placement import Axis

__all__ = ["Curve", "Point", "Profile"]

_VERSION = 1


@dataclass(frozen=True, order=True)
class Point:
    """One measurement: `amount` of work (flops or bytes) took `seconds` (a median); `spread` is
    (q3-q1)/median."""

    amount: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Seconds over an amount of work, through measured points in order of amount.

    Between points it is a straight line in logarithms; below the first it stays (overhead), above the last
    it grows
    in proportion.  It never falls: a point that is faster than a smaller one is lifted to it.
    """

    points: tuple[Point, ...]
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

    def without_gains_by_splitting(self) -> Curve:
        """This curve, with each point lifted to at least the rate of the larger ones.

        A small op that is measured again and again finds its operands in the cache, which it would not in a program:
        taken at its word, cutting a batch into microbatches would make it cheaper.
        """
        lifted: list[Point] = []
        for point in reversed(self.points):
            rate = lifted[-1].seconds / lifted[-1].amount if lifted else 0.0
            lifted.append(Point(point.amount, max(point.seconds, point.amount * rate), point.spread))
        return Curve(tuple(reversed(lifted)))

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


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    Args:
        device: the device's name.
        num_ranks: how many processes measured at the same time.
        date: when, ISO 8601.
        software: versions and settings that the numbers depend on.
        curves: see the module's table.
    """

    device: str
    num_ranks: int
    date: str
    software: Mapping[str, str] = field(hash=False)
    curves: Mapping[str, Curve] = field(hash=False)

    def measured_axes(self, kind: str) -> tuple[Axis, ...]:
        """The axes on which a collective of `kind` was measured."""
        prefix = f"collective/{kind}/"
        found = (key.removeprefix(prefix).split("/") for key in self.curves if key.startswith(prefix))
        return tuple(sorted(Axis(int(size), int(stride)) for size, stride in found))

    def collective(self, kind: str, axis: Axis) -> Curve:
        """The curve of `kind` on one of `measured_axes`."""
        return self.curves[f"collective/{kind}/{axis.size}/{axis.stride}"]

    @property
    def spread(self) -> float:
        """The median of all points' spreads: how far to trust the numbers."""
        spreads = sorted(point.spread for curve in self.curves.values() for point in curve.points)
        return spreads[len(spreads) // 2] if spreads else 0.0

    def to_json(self) -> str:
        """The profile as readable JSON, one curve a line."""
        head = {
            "autopar_profile": _VERSION,
            "device": self.device,
            "num_ranks": self.num_ranks,
            "date": self.date,
            "software": dict(self.software),
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        curves = [
            f"    {json.dumps(key)}: {json.dumps([[p.amount, p.seconds, p.spread] for p in curve.points])}"
            for key, curve in sorted(self.curves.items())
        ]
        lines.append('  "curves": {\n' + ",\n".join(curves) + "\n  }")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            MissingPriceError: `text` is not a profile's JSON of this version.
        """
        try:
            data = cast(dict[str, Any], json.loads(text))
            version = data.pop("autopar_profile")
            if version != _VERSION:
                raise ValueError(f"autopar_profile is {version}, not {_VERSION}")
            curves = {key: Curve(_points(rows)) for key, rows in data.pop("curves").items()}
            return cls(curves=curves, **data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MissingPriceError(
                f"this is not the JSON of a profile ({type(error).__name__}: {error}); measure it again"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, at once or not at all: no reader ever sees half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(self.to_json())
        Path(name).replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            MissingPriceError: the file is not a profile.
        """
        return cls.from_json(Path(path).read_text())


def _points(rows: Iterable[Iterable[float]]) -> tuple[Point, ...]:
    return tuple(Point(*map(float, row)) for row in rows)
