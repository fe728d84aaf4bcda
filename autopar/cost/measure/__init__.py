"""Measures this machine: `measure_profile`.  The only part of `autopar.cost` that loads torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from autopar.cost.measure.collectives import Collectives, default_axes
from autopar.cost.measure.doubt import doubtful_keys
from autopar.cost.measure.machine import CACHE_DIR, profile_path
from autopar.cost.measure.session import load_shared, measure_missing, missing_probes
from autopar.cost.measure.wanted import default_dtypes, quick_probes
from autopar.cost.profile import Profile
from autopar.errors import ProfileError
from autopar.placement import Axis

__all__ = ["CACHE_DIR", "Alone", "Collectives", "default_dtypes", "measure_profile", "profile_path"]


@dataclass(frozen=True)
class Alone:
    """The `Ranks` of a single process."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def prepare(self, axes: Iterable[Axis]) -> None:
        """Nothing to prepare."""

    def all_reduce(self, x: Tensor, axis: Axis, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Nothing to reduce."""
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
    """Measure ops on this device and collectives between all ranks, quickly; every rank gets the same profile.

    Every rank calls it with the same arguments.  Ranks measure at the same time, so that sharing of cores and
    of memory is part of the numbers, and the slowest rank's time counts.  What was measured before is not measured
    again, unless more than 10 minutes ago while the machine was 1.5 times busier than now, or with quartiles more than
    half of the median apart.

    Args:
        communicator: through which ranks talk; without one this process measures alone, and no collectives.
        device_type: ``"cpu"`` or ``"cuda"``.
        budget_s: seconds to spend, about, if nothing was measured before.
        cache_dir: where profiles are kept; without one nothing is read or written.  What was measured before
            on a machine like this, with as many ranks and the same software, is read from there (by rank 0), and what
            is measured now is added.
        axes: groups to measure; by default neighbours in all sizes.
        dtypes: of matrix products and attention; by default float32, on cuda bfloat16 too (and first).

    A cache that can't be read or written is a warning: then everything is measured, and nothing kept.

    Example:
        >>> profile = measure_profile(budget_s=1.0)             # doctest: +SKIP
        >>> ClusterPrices(Cluster.of("cpu"), profile)           # doctest: +SKIP
    """
    ranks = communicator or Alone(torch.device(device_type))
    device = ranks.device
    axes = tuple(axes) if axes is not None else default_axes(ranks.world_size)
    ranks.prepare((Axis(ranks.world_size, 1), *axes))
    path = profile_path(cache_dir, device, ranks.world_size) if cache_dir is not None else None
    try:
        found = load_shared(ranks, path)
    except ProfileError as error:  # on every rank
        found = path = None
        if ranks.rank == 0:
            warnings.warn(f"what was measured before is not used, and nothing is kept: {error}", stacklevel=2)
    probes = quick_probes(device, communicator, axes, dtypes or default_dtypes(device))
    doubtful = doubtful_keys(ranks, found) if found is not None else frozenset[str]()
    lacking = missing_probes(probes, found, doubtful)
    part = sum(probe.share for probe in lacking) / sum(probe.share for probe in probes)
    return measure_missing(ranks, lacking, found, budget_s * part, path)
