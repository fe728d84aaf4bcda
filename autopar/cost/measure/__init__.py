"""Measures this machine: `measure_profile`.  The only part of `autopar.cost` that loads torch."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from autopar.cost.measure.collectives import (
    Collectives,
    default_axes,
    max_over_ranks,
    measure_collectives,
    share_text,
)
from autopar.cost.measure.ops import op_probes
from autopar.cost.measure.probe import Measurement
from autopar.cost.measure.timing import Contention
from autopar.cost.profile import Curve, Point, Profile
from autopar.errors import MissingPriceError
from autopar.placement import Axis

__all__ = ["Collectives", "measure_profile"]

_OPS_SHARE = 0.7
"""Part of the time that ops get when there are collectives to measure too."""


@dataclass(frozen=True)
class _Alone:
    """The communicator of a single process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Nothing to prepare."""

    def all_gather(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        return x

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        return x

    def all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor, axis: Axis, source: int = 0) -> Tensor:
        return x


def measure_profile(
    communicator: Collectives | None = None,
    device_type: str = "cpu",
    budget_s: float = 5.0,
    cache_dir: str | Path | None = None,
    *,
    axes: Sequence[Axis] | None = None,
    dtypes: tuple[str, ...] | None = None,
) -> Profile:
    """Measure ops on this device and collectives between all ranks; every rank gets the same profile.

    Every rank calls it with the same arguments.  Ranks measure at the same time, so that sharing of cores and
    of memory is part of the numbers, and the slowest rank's time counts.

    Args:
        communicator: through which ranks talk; without one this process measures alone, and no collectives.
        device_type: ``"cpu"`` or ``"cuda"``.
        budget_s: seconds to spend, about.
        cache_dir: where to keep profiles; without one nothing is read or written.  What was measured before
            on a machine like this, with as many ranks and the same software, is read from there (by rank 0).
        axes: groups to measure; by default neighbours in all sizes.
        dtypes: of matrix products and attention; by default float32, on cuda bfloat16 too (and first).

    Example:
        >>> profile = measure_profile(budget_s=1.0)             # doctest: +SKIP
        >>> ClusterPrices(Cluster.of("cpu"), profile)           # doctest: +SKIP
    """
    device = communicator.device if communicator else torch.device(device_type)
    talk = communicator or _Alone(device)
    axes = tuple(axes) if axes is not None else default_axes(talk.world_size)
    dtypes = dtypes or (("bfloat16", "float32") if device.type == "cuda" else ("float32",))
    talk.prepare((Axis(talk.world_size, 1), *axes))
    path = _cache_path(cache_dir, device, talk.world_size, axes, dtypes)
    found = _load(path, talk)
    if found is not None:
        return found
    profile = _measure(talk, device, axes, dtypes, budget_s)
    if path is not None and talk.rank == 0:
        profile.save(path)
    return profile


def _measure(
    talk: Collectives, device: torch.device, axes: tuple[Axis, ...], dtypes: tuple[str, ...], budget_s: float
) -> Profile:
    is_alone = talk.world_size == 1
    max_over_ranks(talk, [0.0])  # so that all start together
    contention = Contention(device)
    probes = op_probes(device, dtypes)
    each_s = budget_s * (1.0 if is_alone else _OPS_SHARE) / sum(probe.share for probe in probes)
    ops = [measurement for probe in probes for measurement in probe.measure(each_s * probe.share)]
    now_s, factor = max_over_ranks(talk, [time.time(), contention.factor()])
    links = [] if is_alone else list(measure_collectives(talk, axes, budget_s * (1 - _OPS_SHARE)))
    found = ops + links
    seconds = max_over_ranks(talk, [m.taken.seconds * factor for m in ops] + [m.taken.seconds for m in links])
    spreads = max_over_ranks(talk, [m.taken.spread for m in found])
    return Profile(
        device=_device_name(device),
        num_ranks=talk.world_size,
        date=datetime.fromtimestamp(int(now_s), UTC).isoformat(),
        software={**_software(device), "contention": f"{factor:.2f}"},
        curves=_curves(found, seconds, spreads),
    )


def _curves(found: list[Measurement], seconds: list[float], spreads: list[float]) -> dict[str, Curve]:
    points: dict[str, list[Point]] = {}
    for measurement, taken_s, spread in zip(found, seconds, spreads, strict=True):
        points.setdefault(measurement.key, []).append(Point(measurement.amount, taken_s, round(spread, 4)))
    return {key: Curve(tuple(rows)) for key, rows in points.items()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _software(device: torch.device) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda) if device.type == "cuda" else "",
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "processor": platform.processor() or platform.machine(),
    }


def _cache_path(
    cache_dir: str | Path | None,
    device: torch.device,
    world_size: int,
    axes: tuple[Axis, ...],
    dtypes: tuple[str, ...],
) -> Path | None:
    if cache_dir is None:
        return None
    machine = (
        platform.node(),
        _device_name(device),
        *sorted(_software(device).items()),
        world_size,
        axes,
        dtypes,
    )
    digest = hashlib.sha256(repr(machine).encode()).hexdigest()[:16]
    return Path(cache_dir).expanduser() / f"profile-{device.type}-{world_size}-{digest}.json"


def _load(path: Path | None, talk: Collectives) -> Profile | None:
    """Rank 0's cached profile, or None on every rank.  A damaged file counts as none and is written anew."""
    if path is None:
        return None
    text = path.read_text() if talk.rank == 0 and path.exists() else ""
    text = share_text(talk, text)
    try:
        return Profile.from_json(text) if text else None
    except MissingPriceError:
        return None
