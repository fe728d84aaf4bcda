"""The norm of all gradients, each entry counted once whatever is replicated, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.failures import naming_failures
from autopar.lower.compat import local_part_of, scale_in_place, tensor_norms
from autopar.lower.parameters.store import Stored
from autopar.lower.run.stage_map import StageMap
from autopar.placement import Axis, mesh_axes

__all__ = ["clip_gradients"]


def clip_gradients(
    gradients: Sequence[tuple[Stored, Tensor]],
    mesh: tuple[int, ...],
    stages: StageMap,
    communicator: Communicator,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale `gradients` so that their joint p-norm is at most `max_norm`; see
    `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before, equal on all ranks.

    Raises:
        RuntimeError: `error_if_nonfinite` and the norm is not finite.
        ValueError: `norm_type` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be positive (inf for the largest entry)")
    total = _total_norm(gradients, mesh, stages, communicator, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of the gradients is {total.item()}, so they can't be clipped. Pass "
            "error_if_nonfinite=False to scale by it anyway"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for _, gradient in gradients:
        local = local_part_of(gradient)
        by_dtype.setdefault(local.dtype, []).append(local)
    with torch.no_grad():
        for dtype, locals_ in by_dtype.items():
            scale_in_place(locals_, scale.to(dtype))
    return total


@torch.no_grad()
def _total_norm(
    gradients: Sequence[tuple[Stored, Tensor]],
    mesh: tuple[int, ...],
    stages: StageMap,
    communicator: Communicator,
    norm_type: float,
) -> Tensor:
    """Gradients sharded on the same axes are summed together over exactly these axes, and then all over the stages.

    A parameter that is tied across stages counts on the first group that has it.
    """
    groups: dict[tuple[Axis, ...], list[Tensor]] = {}
    for stored, gradient in gradients:
        if stored.groups[0] != stages.group:
            continue
        axes = tuple(a for a, p in zip(mesh_axes(mesh), stored.layout, strict=True) if p.is_shard and a.size > 1)
        groups.setdefault(axes, []).append(local_part_of(gradient))
    totals = [_group_power(groups[axes], axes, communicator, norm_type) for axes in sorted(groups)]
    is_largest = math.isinf(norm_type)
    # float64 across stages, whatever the dtypes of each.
    joint = torch.zeros((), device=communicator.device, dtype=torch.float64 if stages.is_pipeline else torch.float32)
    if totals:
        joined = torch.stack([t.to(totals[0].dtype) for t in totals])
        joint = joined.max() if is_largest else joined.sum()
    if stages.is_pipeline:
        with naming_failures(stages.who, "the sum of gradient norms over the stages"):
            joint = communicator.all_reduce(joint.double(), stages.axis, "max" if is_largest else "sum")
    return joint if is_largest else joint.pow(1 / norm_type)


def _group_power(locals_: list[Tensor], axes: tuple[Axis, ...], communicator: Communicator, norm_type: float) -> Tensor:
    """The p-th power of the norm of these gradients (for inf the norm itself), over all their shards."""
    norms = [norm.flatten() for norm in tensor_norms(locals_, norm_type)]
    wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    joined = torch.cat([n.to(wide) for n in norms])
    power = joined.max() if math.isinf(norm_type) else joined.pow(norm_type).sum()
    for axis in axes:
        power = communicator.all_reduce(power, axis, "max" if math.isinf(norm_type) else "sum")
    return power
