"""Measures what a profile lacks, and keeps each piece as soon as it is there."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from autopar.cost import profile_file
from autopar.cost.measure.machine import describe_software, device_name
from autopar.cost.measure.probe import Measurement, Probe
from autopar.cost.measure.ranks import Ranks, max_over_ranks, share_text
from autopar.cost.measure.timing import warm_up
from autopar.cost.profile import Curve, Point, Profile, Reading, Readings
from autopar.errors import ProfileError

__all__ = ["Progress", "load_shared", "measure_missing", "missing_probes"]

_KEEP_S = 0.5  # the profile is written no more often: what a killed process loses, against time spent on writing


@dataclass(frozen=True)
class Progress:
    """`num_done` of `num_probes` have been measured, and `key` is being measured now (``""``: nothing any more)."""

    num_done: int
    num_probes: int
    key: str


def load_shared(ranks: Ranks, path: Path | None) -> Profile | None:
    """What rank 0 finds in the file `path`, on every rank.  None: nothing, or nothing of use (see `profile_file.read`).

    Raises:
        ProfileError: on every rank, if the file holds the profile of another machine, or can't be read.
    """
    if path is None:
        return None

    def read() -> str:
        result = profile_file.read(path)
        if result is None:
            return ""
        _check_same_machine(result, _empty(ranks), path)
        return result.to_json()

    text = share_text(ranks, read)
    return Profile.from_json(text) if text else None


def missing_probes(
    probes: Iterable[Probe], found: Profile | None, again: Container[str] = frozenset[str]()
) -> list[Probe]:
    """Those of `probes` that `found` does not have, or has at fewer points, or that have a key in `again`."""

    def has(key: str, num_points: int) -> bool:
        if found is None or key in again:
            return False
        series = found.curves.get(key) or found.readings.get(key)
        return series is not None and len(series.points) >= num_points

    return [probe for probe in probes if not all(has(key, probe.num_points) for key in probe.keys)]


def measure_missing(
    ranks: Ranks,
    probes: Sequence[Probe],
    found: Profile | None,
    budget_s: float,
    path: Path | None = None,
    *,
    tell: Callable[[Progress], None] = lambda _: None,
    stops: bool = False,
) -> Profile:
    """Measure `probes`; every rank calls it with equal arguments and gets the same profile.

    Args:
        ranks: who measures; the slowest of them counts.
        probes: what to measure, such as `missing_probes`.
        found: what there is.
        budget_s: seconds to spend, about; each probe runs a few times even if that takes longer.
        path: the file that rank 0 adds to, after each probe that ends half a second or more after the last time.
        tell: is told what is going on.
        stops: measure nothing more once the budget is spent, instead of all of `probes`.

    Returns:
        `found`, and what was measured.
    """
    base = found or _empty(ranks)
    if not probes:
        return base
    session = _Session(ranks, path if ranks.rank == 0 else None)
    left = sum(probe.share for probe in probes)
    done = 0
    try:
        for probe in probes:
            if stops and session.spent_s >= budget_s:
                break
            tell(Progress(done, len(probes), probe.keys[0]))
            session.measure(probe, max(0.0, budget_s - session.spent_s) * probe.share / left)
            session.keep(_KEEP_S)
            left -= probe.share
            done += 1
    finally:
        session.keep()
    tell(Progress(done, len(probes), ""))
    return base.merged(session.profile())


@dataclass
class _Session:
    """What has been measured since it began, the same on every rank."""

    ranks: Ranks
    path: Path | None
    spent_s: float = 0.0
    date: str = ""
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])
    readings: dict[str, Readings] = field(default_factory=dict[str, Readings])
    kept_s: float = float("-inf")
    num_kept: int = 0

    def __post_init__(self) -> None:
        warm_up(self.ranks.device)
        max_over_ranks(self.ranks, [0.0])  # so that all start together
        self._started = time.perf_counter()

    def measure(self, probe: Probe, slice_s: float) -> None:
        """Measure `probe` in about `slice_s`; a failure that no rank waits for is a warning."""
        measurements, error = self._attempt(probe, slice_s)
        spent_s = time.perf_counter() - self._started
        has_failed, self.spent_s, now_s = max_over_ranks(self.ranks, [float(error is not None), spent_s, time.time()])
        if has_failed:
            told = f"{type(error).__name__}: {error}" if error else "another rank says why"
            warnings.warn(f"{' and '.join(probe.keys)} can't be measured here: {told}", stacklevel=2)
            return
        values = max_over_ranks(self.ranks, [m.taken.seconds for m in measurements])
        spreads = max_over_ranks(self.ranks, [m.taken.spread for m in measurements])
        self.date = datetime.fromtimestamp(int(now_s), UTC).isoformat()
        points: dict[str, list[tuple[float, float, float]]] = {}
        for measurement, value, spread in zip(measurements, values, spreads, strict=True):
            points.setdefault(measurement.key, []).append((measurement.amount, value, round(spread, 4)))
        for key, rows in points.items():
            if probe.is_reading:
                self.readings[key] = Readings(tuple(Reading(*row) for row in rows), self.date)
            else:
                self.curves[key] = Curve(tuple(Point(*row) for row in rows), self.date)

    def _attempt(self, probe: Probe, slice_s: float) -> tuple[list[Measurement], Exception | None]:
        if not probe.is_local:
            return list(probe.measure(slice_s)), None
        try:
            return list(probe.measure(slice_s)), None
        except Exception as error:  # noqa: BLE001  (whatever it is, the others must not wait for this rank)
            return [], error

    def keep(self, every_s: float = 0.0) -> None:
        """Add all that was measured to the file, if the last time is `every_s` ago."""
        path = self.path
        if path is None or self._num_measured == self.num_kept or time.perf_counter() - self.kept_s < every_s:
            return
        if profile_file.keep(path, lambda found: (found or _empty(self.ranks)).merged(self.profile())):
            self.kept_s, self.num_kept = time.perf_counter(), self._num_measured
        else:
            self.path = None

    @property
    def _num_measured(self) -> int:
        return len(self.curves) + len(self.readings)

    def profile(self) -> Profile:
        """What was measured, and only that."""
        return replace(_empty(self.ranks), date=self.date, curves=dict(self.curves), readings=dict(self.readings))


def _empty(ranks: Ranks) -> Profile:
    return Profile(device_name(ranks.device), ranks.world_size, "", describe_software(ranks.device), {})


def _check_same_machine(found: Profile, here: Profile, path: Path) -> None:
    theirs, ours = (
        {"device": profile.device, "number of processes": str(profile.num_ranks), **profile.software}
        for profile in (found, here)
    )
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differing:
        told = ", ".join(
            f"{name} is {theirs.get(name, 'not there')}, here {ours.get(name, 'none')}" for name in differing
        )
        raise ProfileError(f"{path} is the profile of another machine: {told}. Name another file, or remove this one")
