"""What is measured: the few probes that a plan can wait for, and all that a profile can hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.cost.measure.collectives import Collectives, collective_probes
from autopar.cost.measure.interference import interference_probes
from autopar.cost.measure.memory import communicator_probes, memory_probes
from autopar.cost.measure.ops import op_probes
from autopar.cost.measure.optimizer import optimizer_probes
from autopar.cost.measure.probe import Probe
from autopar.placement import Axis

__all__ = ["default_dtypes", "dense_probes", "quick_probes"]

_OVERLAPPED = ("all_gather", "all_reduce", "reduce_scatter")
"""What a training step runs beside compute."""


def default_dtypes(device: torch.device) -> tuple[str, ...]:
    """In what matrix products and attention are measured; other ops in the first of them."""
    return ("bfloat16", "float32") if device.type == "cuda" else ("float32",)


def quick_probes(
    device: torch.device, communicator: Collectives | None, axes: Sequence[Axis], dtypes: tuple[str, ...]
) -> tuple[Probe, ...]:
    """What `parallelize` measures; with a communicator of several ranks, collectives on `axes` too."""
    ops = op_probes(device, dtypes)
    if communicator is None or communicator.world_size == 1:
        return ops
    interference = interference_probes(communicator, axes, kinds=_OVERLAPPED)
    optimizer = optimizer_probes(communicator)
    return (*ops, *optimizer, *collective_probes(communicator, axes), *interference)


def dense_probes(
    device: torch.device, communicator: Collectives | None, axes: Sequence[Axis], dtypes: tuple[str, ...]
) -> tuple[Probe, ...]:
    """What ``python -m autopar.profile`` measures: dense sweeps, memory, and what collectives do to compute."""
    ops = (*op_probes(device, dtypes, is_dense=True), *memory_probes(device))
    if communicator is None or communicator.world_size == 1:
        return ops
    return (
        *ops,
        *optimizer_probes(communicator),
        *communicator_probes(communicator, axes),
        *collective_probes(communicator, axes, is_dense=True),
        *interference_probes(communicator, axes, is_dense=True),
    )
