"""Runs the probes whose numbers a profile lacks, and saves results while it goes on."""

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

_SAVE_INTERVAL_S = 0.5  # between writes: longer intervals lose more if the process is killed, shorter ones cost time


@dataclass(frozen=True)
class Progress:
    """`num_done` of `num_probes` probes have run, and the one of `key` is running (``""``: all are done)."""

    num_done: int
    num_probes: int
    key: str


def load_shared(ranks: Ranks, path: Path | None) -> Profile | None:
    """Return on every rank the profile that rank 0 reads from `path`; None if there is none (see `profile_file.read`).

    Raises:
        ProfileError: on every rank, if the file holds the profile of another machine, or can't be read.
    """
    if path is None:
        return None

    def read() -> str:
        profile = profile_file.read(path)
        if profile is None:
            return ""
        _check_same_machine(profile, _empty(ranks), path)
        return profile.to_json()

    text = share_text(ranks, read)
    return Profile.from_json(text) if text else None


def missing_probes(
    probes: Iterable[Probe], profile: Profile | None, again: Container[str] = frozenset[str]()
) -> list[Probe]:
    """The probes whose results `profile` lacks, or has with fewer points, or that have a key in `again`."""

    def has(key: str, num_points: int) -> bool:
        if profile is None or key in again:
            return False
        series = profile.curves.get(key) or profile.readings.get(key)
        return series is not None and len(series.points) >= num_points

    return [probe for probe in probes if not all(has(key, probe.num_points) for key in probe.keys)]


def measure_missing(
    ranks: Ranks,
    probes: Sequence[Probe],
    known: Profile | None,
    budget_s: float,
    path: Path | None = None,
    *,
    on_progress: Callable[[Progress], None] = lambda _: None,
    stops: bool = False,
) -> Profile:
    """Run `probes`; every rank calls it with equal arguments and gets the same profile.

    Args:
        ranks: the ranks that measure; the slowest of them counts.
        probes: the probes to run, such as `missing_probes`.
        known: measurements that exist already.
        budget_s: approximate seconds to spend; each probe runs a few times even if that takes longer.
        path: the file to which rank 0 adds results, at most every half a second.
        on_progress: called before each probe, and at the end.
        stops: run no more probes once the budget is spent, instead of all of them.

    Returns:
        `known` and the new measurements.
    """
    base = known or _empty(ranks)
    if not probes:
        return base
    session = _Measurements(ranks, path if ranks.rank == 0 else None)
    remaining_share = sum(probe.share for probe in probes)
    num_done = 0
    try:
        for probe in probes:
            if stops and session.spent_s >= budget_s:
                break
            on_progress(Progress(num_done, len(probes), probe.keys[0]))
            session.measure(probe, max(0.0, budget_s - session.spent_s) * probe.share / remaining_share)
            session.save(_SAVE_INTERVAL_S)
            remaining_share -= probe.share
            num_done += 1
    finally:
        session.save()
    on_progress(Progress(num_done, len(probes), ""))
    return base.merged(session.profile())


@dataclass
class _Measurements:
    """The measurements since its start, which are the same on every rank."""

    ranks: Ranks
    path: Path | None
    spent_s: float = 0.0
    date: str = ""
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])
    readings: dict[str, Readings] = field(default_factory=dict[str, Readings])
    saved_at_s: float = float("-inf")
    num_saved: int = 0

    def __post_init__(self) -> None:
        warm_up(self.ranks.device)
        max_over_ranks(self.ranks, [0.0])  # so that all ranks start at the same time
        self._started = time.perf_counter()

    def measure(self, probe: Probe, slice_s: float) -> None:
        """Run `probe` in about `slice_s`; if a local probe fails, warn."""
        measurements, error = self._attempt(probe, slice_s)
        spent_s = time.perf_counter() - self._started
        has_failed, self.spent_s, now_s = max_over_ranks(self.ranks, [float(error is not None), spent_s, time.time()])
        if has_failed:
            reason = f"{type(error).__name__}: {error}" if error else "another rank says why"
            warnings.warn(f"{' and '.join(probe.keys)} can't be measured here: {reason}", stacklevel=2)
            return
        values = max_over_ranks(self.ranks, [measurement.sample.seconds for measurement in measurements])
        spreads = max_over_ranks(self.ranks, [measurement.sample.spread for measurement in measurements])
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
        except Exception as error:  # noqa: BLE001  (after any error, other ranks must not wait for this one)
            return [], error

    def save(self, interval_s: float = 0.0) -> None:
        """Add new measurements to the file, if it was last written at least `interval_s` ago."""
        path = self.path
        if path is None or self._num_measured == self.num_saved or time.perf_counter() - self.saved_at_s < interval_s:
            return
        if profile_file.keep(path, lambda profile: (profile or _empty(self.ranks)).merged(self.profile())):
            self.saved_at_s, self.num_saved = time.perf_counter(), self._num_measured
        else:
            self.path = None

    @property
    def _num_measured(self) -> int:
        return len(self.curves) + len(self.readings)

    def profile(self) -> Profile:
        """The profile of these measurements alone."""
        return replace(_empty(self.ranks), date=self.date, curves=dict(self.curves), readings=dict(self.readings))


def _empty(ranks: Ranks) -> Profile:
    return Profile(device_name(ranks.device), ranks.world_size, "", describe_software(ranks.device), {})


def _check_same_machine(profile: Profile, here: Profile, path: Path) -> None:
    theirs, ours = (
        {"device": each.device, "number of processes": str(each.num_ranks), **each.software} for each in (profile, here)
    )
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differing:
        differences = ", ".join(
            f"{name} is {theirs.get(name, 'missing')}, here {ours.get(name, 'missing')}" for name in differing
        )
        raise ProfileError(
            f"{path} is the profile of another machine: {differences}. Name another file, or remove this one"
        )
