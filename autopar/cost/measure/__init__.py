"""Measures this machine: `measure_profile`.  The only part of `autopar.cost` that imports torch.

`ops` (with the calls of `op_calls`) and `optimizer` measure one device, `collective_times` and `interference` measure
between `ranks`, `layer_times` measures whole layers of a plan.  Measurements are probes (`probe`), timed on the
device's clock (`timing`); `missing` runs those whose numbers the profile of this `machine` lacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from autopar.cost.measure.collective_times import Collectives, collective_probes, default_axes
from autopar.cost.measure.interference import interference_probes
from autopar.cost.measure.machine import CACHE_DIR, profile_path
from autopar.cost.measure.missing import load_shared, measure_missing, missing_probes
from autopar.cost.measure.ops import op_probes
from autopar.cost.measure.optimizer import optimizer_probes
from autopar.cost.measure.probe import Probe
from autopar.cost.measure.ranks import Alone
from autopar.cost.profile import Profile
from autopar.errors import ProfileError
from autopar.placement import Axis

__all__ = [
    "CACHE_DIR",
    "Alone",
    "Collectives",
    "default_dtypes",
    "dense_probes",
    "measure_profile",
    "profile_path",
    "quick_probes",
]

_OVERLAPPED = ("all_gather", "all_reduce", "reduce_scatter")
"""The collectives that a training step overlaps with compute."""


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

    Every rank calls it with the same arguments.  Ranks measure at the same time, so that the numbers include contention
    for memory, and the slowest rank's time counts.  Cached measurements are not repeated.

    Args:
        communicator: the communicator of the ranks; without one this process measures alone, and no collectives.
        device_type: ``"cpu"``, or torch's device type of an accelerator, such as ``"cuda"``.
        budget_s: approximate seconds to spend if nothing is cached.
        cache_dir: the folder of cached profiles; without one nothing is read or written.  Rank 0 reads the measurements
            of a machine like this, with the same number of ranks and the same software, and adds the new ones.
        axes: groups to measure; by default neighbors in all sizes.
        dtypes: of matrix products and attention; by default float32, on accelerators bfloat16 too (and first).

    If the cache can't be read or written, it warns, measures everything, and caches nothing.

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
        cached = load_shared(ranks, path)
    except ProfileError as error:  # on every rank
        cached = path = None
        if ranks.rank == 0:
            warnings.warn(f"cached measurements are not used, and new ones are not kept: {error}", stacklevel=2)
    probes = quick_probes(device, communicator, axes, dtypes or default_dtypes(device))
    missing = missing_probes(probes, cached)
    share = sum(probe.share for probe in missing) / sum(probe.share for probe in probes)
    return measure_missing(ranks, missing, cached, budget_s * share, path)


def default_dtypes(device: torch.device) -> tuple[str, ...]:
    """The dtypes in which matrix products and attention are measured; other ops are measured in the first one."""
    return ("float32",) if device.type == "cpu" else ("bfloat16", "float32")


def quick_probes(
    device: torch.device, communicator: Collectives | None, axes: Sequence[Axis], dtypes: tuple[str, ...]
) -> tuple[Probe, ...]:
    """The probes of `parallelize`; with a communicator of several ranks, they include collectives on `axes`."""
    local = (*op_probes(device, dtypes), *optimizer_probes(communicator or Alone(device)))
    if communicator is None or communicator.world_size == 1:
        return local
    interference = interference_probes(communicator, axes, kinds=_OVERLAPPED)
    return (*local, *collective_probes(communicator, axes), *interference)


def dense_probes(
    device: torch.device, communicator: Collectives | None, axes: Sequence[Axis], dtypes: tuple[str, ...]
) -> tuple[Probe, ...]:
    """The probes of ``python -m autopar.profile``: dense sweeps, including how much collectives slow down compute."""
    local = (*op_probes(device, dtypes, is_dense=True), *optimizer_probes(communicator or Alone(device)))
    if communicator is None or communicator.world_size == 1:
        return local
    return (
        *local,
        *collective_probes(communicator, axes, is_dense=True),
        *interference_probes(communicator, axes, is_dense=True),
    )
