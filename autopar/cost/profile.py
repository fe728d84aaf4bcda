"""A profile: measurements of real devices and links, as plain data and readable JSON.

The keys of `Profile.curves`, seconds over an amount of work:

=================================  ====================================================
``matmul/<dtype>/<n>x<m>/forward`` seconds over flops of products with a matrix of n rows and m columns; also
                                   ``backward`` (both gradients)
``batched/<dtype>/forward``        the same for batches of products; ``convolution/<dtype>``
``attention/<dtype>/<how>/<n>/<m>`` ``.../forward`` and ``.../backward``: over flops, for head size n and length m; how:
                                   ``causal``, ``full``; ``plain``: as products, as on a CPU with a trained mask
``op/<packet>/forward``            seconds over bytes moved; also ``backward``.  ``op/<packet>/<width>/forward``: for
                                   rows of this width; ``op/<packet>/number/forward``: with a number as an operand
``elementwise/forward``            the same for any other op; also ``backward``
``view/forward``                   one point: seconds of an op that moves nothing; also ``backward``
``optimizer``                      seconds over bytes moved
``optimizer/tensor``               one point: seconds for each parameter, in addition to those for its bytes
``collective/<kind>/<n>/<stride>`` seconds over the NCCL tests' "size", on ``Axis(n, stride)``
=================================  ====================================================

The keys of `Profile.readings`, other values over an amount:

===================================  ====================================================
``interference/<kind>/<n>/<stride>`` over bytes of a collective: the seconds by which compute gets slower for each
                                     second of the collective, in [0, 1]; its spread is the interquartile range
===================================  ====================================================

`Profile.layers` holds times of whole layers, by keys of those who store them.  To change the file of a profile that
other processes may be changing too, use `autopar.cost.profile_file.update`.
"""

from __future__ import annotations

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

from autopar.errors import MissingPriceError
from autopar.placement import Axis
from autopar.user_text.json_reading import check_fields, read_json

__all__ = ["Curve", "LayerTime", "Point", "Profile", "Reading", "Readings"]


@dataclass(frozen=True, order=True)
class Point:
    """One measurement: `amount` of work (flops or bytes) took `seconds` (a median); `spread` is (q3-q1)/median."""

    amount: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of an amount of work, through measured points in order of amount.

    Between points it is linear in logarithms; below the first it is constant (overhead), above the last it grows
    in proportion.  It never falls: a point below a smaller amount's seconds is raised to them.

    Args:
        points: the measurements, of positive amount.
        date: when they were taken, ISO 8601; ``""``: unknown.
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
        weight = (at - amounts[left]) / (amounts[right] - amounts[left])
        return math.exp(seconds[left] + weight * (seconds[right] - seconds[left]))

    @property
    def overhead_s(self) -> float:
        """Seconds of the smallest amount."""
        return math.exp(self._logs[1][0])

    @property
    def spread(self) -> float:
        """The median spread of the points."""
        spreads = sorted(point.spread for point in self.points)
        return spreads[len(spreads) // 2]


_VERSION = 4


@dataclass(frozen=True, order=True)
class Reading:
    """One measurement other than seconds of work: `value` at `amount`; `spread` is (q3-q1)/median."""

    amount: float
    value: float
    spread: float = 0.0


@dataclass(frozen=True)
class Readings:
    """Measurements of one quantity at several amounts, taken at `date`."""

    points: tuple[Reading, ...]
    date: str = ""


@dataclass(frozen=True)
class LayerTime:
    """The measured time of a whole layer.

    Args:
        forward_s: seconds of its forward, without collectives.
        backward_s: seconds of its backward, without collectives.
        spread: (q3-q1)/median of the sum.
        date: when it was timed, ISO 8601.
    """

    forward_s: float
    backward_s: float
    spread: float = 0.0
    date: str = ""


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine.

    Args:
        device: the device's name.
        num_ranks: the number of processes that measured at the same time.
        date: when it was last added to, ISO 8601.
        software: versions and settings that the numbers depend on.
        curves: see the first table of the module's docstring.
        readings: see its second table.
        layers: times of whole layers.
    """

    device: str
    num_ranks: int
    date: str
    software: Mapping[str, str] = field(hash=False)
    curves: Mapping[str, Curve] = field(hash=False)
    readings: Mapping[str, Readings] = field(default_factory=dict[str, Readings], hash=False)
    layers: Mapping[str, LayerTime] = field(default_factory=dict[str, LayerTime], hash=False)

    def with_layers(self, layers: Mapping[str, LayerTime]) -> Self:
        """Return this profile with `layers` added; they replace old ones of the same key."""
        return replace(self, layers={**self.layers, **layers})

    def merged(self, newer: Profile) -> Self:
        """Return this profile with everything of `newer` (of the same machine), which wins where both have an entry."""
        return replace(
            self,
            date=max(self.date, newer.date),
            curves={**self.curves, **newer.curves},
            readings={**self.readings, **newer.readings},
            layers={**self.layers, **newer.layers},
        )

    def measured_axes(self, kind: str) -> tuple[Axis, ...]:
        """The axes on which a collective of `kind` was measured."""
        return _axes(self.curves, f"collective/{kind}/")

    def collective(self, kind: str, axis: Axis) -> Curve:
        """The curve of `kind` on one of `measured_axes`."""
        return self.curves[f"collective/{kind}/{axis.size}/{axis.stride}"]

    def interference(self, kind: str, axis: Axis) -> float | None:
        """The seconds by which compute gets slower for each second of such a collective, in [0, 1].

        It is that of the largest message on the measured axis most similar to `axis`, because large messages cost the
        most time.  None: no collective of `kind` was measured together with compute.
        """
        axes = _axes(self.readings, f"interference/{kind}/")
        if not axes:
            return None
        nearest = min(axes, key=lambda a: (abs(a.size - axis.size), abs(a.stride - axis.stride), a))
        return max(self.readings[f"interference/{kind}/{nearest.size}/{nearest.stride}"].points).value

    @property
    def spread(self) -> float:
        """The median of all points' spreads: a measure of the numbers' precision."""
        spreads = sorted(point.spread for curve in self.curves.values() for point in curve.points)
        return spreads[len(spreads) // 2] if spreads else 0.0

    def to_json(self) -> str:
        """The profile as readable JSON, with one curve, reading or layer per line."""
        head = {
            "autopar_profile": _VERSION,
            "device": self.device,
            "num_ranks": self.num_ranks,
            "date": self.date,
            "software": dict(self.software),
        }
        parts = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        sections: dict[str, dict[str, dict[str, Any]]] = {
            "curves": {key: _series(c, [[p.amount, p.seconds, p.spread] for p in c.points])
                       for key, c in self.curves.items()},
            "readings": {key: _series(r, [[p.amount, p.value, p.spread] for p in r.points])
                         for key, r in self.readings.items()},
            "layers": {key: asdict(layer) for key, layer in self.layers.items()},
        }  # fmt: skip
        for name, rows in sections.items():
            lines = [f"    {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted(rows.items())]
            inside = "{\n" + ",\n".join(lines) + "\n  }" if lines else "{}"
            parts.append(f'  "{name}": {inside}')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            MissingPriceError: `text` is not a profile's JSON of this version.
        """
        try:
            data = cast(dict[str, Any], read_json(text))
            version = data.pop("autopar_profile")
            if version != _VERSION:
                raise ValueError(f"autopar_profile is {version!r:.40}, not {_VERSION}")
            check_fields(cls, data, "profile")
            data |= {name: _read_section(data, name) for name in _SECTIONS}
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError, MissingPriceError) as error:
            raise MissingPriceError(
                f"this is not the JSON of a profile ({type(error).__name__}: {error}); measure it again: "
                "python -m autopar.profile"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, atomically: no reader ever sees half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.unlink(missing_ok=True)
        with part.open("x", encoding="utf-8") as file:  # "x" doesn't follow a link that somebody put there
            file.write(self.to_json())
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            MissingPriceError: the file is not a profile.
            OSError: the file can't be read.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))


def _axes(keys: Iterable[str], prefix: str) -> tuple[Axis, ...]:
    pairs = (key.removeprefix(prefix).split("/") for key in keys if key.startswith(prefix))
    return tuple(sorted(Axis(int(size), int(stride)) for size, stride in pairs))


def _series(series: Curve | Readings, points: list[list[float]]) -> dict[str, Any]:
    return {"date": series.date, "points": points}


_SECTIONS: dict[str, tuple[type[Any], Callable[..., Any] | None]] = {
    "curves": (Curve, Point),
    "readings": (Readings, Reading),
    "layers": (LayerTime, None),
}
"""Section -> the dataclass of its entries, and that of their points."""

_LEAST, _MOST = 1e-12, 1e21
"""Bounds of the seconds, bytes and flops of a curve, so that interpolation, which multiplies three of them, is finite.
"""

# First part of a key -> the pattern of the rest, for keys that are parsed; others are only looked up.
_COUNT = "[1-9][0-9]{0,17}"
_KEYS = {
    "matmul": f"[^/]*/({_COUNT}x{_COUNT}/)?[^/]+",
    "attention": f"[^/]*/([^/]*/{_COUNT}/{_COUNT}/)?[^/]+",
    "op": f"[^/]*/({_COUNT}/|number/)?[^/]+",
    "collective": f"[^/]*/{_COUNT}/{_COUNT}",
    "interference": f"[^/]*/{_COUNT}/{_COUNT}",
}


def _read_section(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: _read_entry(f"{name}[{key!r:.80}]", name, key, row) for key, row in data[name].items()}


def _read_entry(where: str, section: str, key: str, row: dict[str, Any]) -> Curve | Readings | LayerTime:
    kind, point = _SECTIONS[section]
    check_fields(kind, row, where, is_whole=False)
    family, _, rest = key.partition("/")
    if point is not None and family in _KEYS and not re.fullmatch(_KEYS[family], rest):
        raise ValueError(f"{where}: it is not a key of the form {family}/{_KEYS[family]}")
    points: list[list[float]] = row.get("points", [])
    numbers = [value for value in row.values() if isinstance(value, int | float)] + [n for p in points for n in p]
    if not all(0 <= number <= _MOST for number in numbers):
        raise ValueError(f"{where}: its numbers must be between 0 and {_MOST:g}, but one of them is not: {row!r:.200}")
    if point is None:
        return kind(**row)
    least = 0.0 if kind is Readings else _LEAST
    if not points or not all(number >= least for p in points for number in p[:2]):
        raise ValueError(f"{where}: it needs points of at least {least:g}, but has {points!r:.200}")
    row = row | {"points": tuple(point(*map(float, p)) for p in points)}
    return kind(**row)
