"""Measures this machine: `measure_profile`.  The only part of `autopar.cost` that loads torch.

What is measured, in which file: `ops` (of the `op_calls` that it lists), `optimizer`: on one device;
`collective_times`, `interference`: between `ranks`; `layer_times`: whole layers of a plan.  Each gives a few probes
(`probe`), timed on the device's clock (`timing`); `missing` runs those whose numbers the profile of this `machine`
lacks.
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
"""What a training step runs while it computes."""


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

    Every rank calls it with the same arguments.  Ranks measure at the same time, so that sharing of memory is part of
    the numbers, and the slowest rank's time counts.  What was measured before is not measured again.

    Args:
        communicator: through which ranks talk; without one this process measures alone, and no collectives.
        device_type: ``"cpu"``, or what torch calls the accelerators, such as ``"cuda"``.
        budget_s: seconds to spend, about, if nothing was measured before.
        cache_dir: where profiles are kept; without one nothing is read or written.  What was measured before
            on a machine like this, with as many ranks and the same software, is read from there (by rank 0), and what
            is measured now is added.
        axes: groups to measure; by default neighbours in all sizes.
        dtypes: of matrix products and attention; by default float32, on accelerators bfloat16 too (and first).

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
        result = load_shared(ranks, path)
    except ProfileError as error:  # on every rank
        result = path = None
        if ranks.rank == 0:
            warnings.warn(f"what was measured before is not used, and nothing is kept: {error}", stacklevel=2)
    probes = quick_probes(device, communicator, axes, dtypes or default_dtypes(device))
    missing = missing_probes(probes, result)
    part = sum(probe.share for probe in missing) / sum(probe.share for probe in probes)
    return measure_missing(ranks, missing, result, budget_s * part, path)


def default_dtypes(device: torch.device) -> tuple[str, ...]:
    """In what matrix products and attention are measured; other ops in the first of them."""
    return ("float32",) if device.type == "cpu" else ("bfloat16", "float32")


def quick_probes(
    device: torch.device, communicator: Collectives | None, axes: Sequence[Axis], dtypes: tuple[str, ...]
) -> tuple[Probe, ...]:
    """What `parallelize` measures; with a communicator of several ranks, collectives on `axes` too."""
    own = (*op_probes(device, dtypes), *optimizer_probes(communicator or Alone(device)))
    if communicator is None or communicator.world_size == 1:
        return own
    interference = interference_probes(communicator, axes, kinds=_OVERLAPPED)
    return (*own, *collective_probes(communicator, axes), *interference)


def dense_probes(
    device: torch.device, communicator: Collectives | None, axes: Sequence[Axis], dtypes: tuple[str, ...]
) -> tuple[Probe, ...]:
    """What ``python -m autopar.profile`` measures: dense sweeps, and by how much collectives slow compute down."""
    own = (*op_probes(device, dtypes, is_dense=True), *optimizer_probes(communicator or Alone(device)))
    if communicator is None or communicator.world_size == 1:
        return own
    return (
        *own,
        *collective_probes(communicator, axes, is_dense=True),
        *interference_probes(communicator, axes, is_dense=True),
    )
