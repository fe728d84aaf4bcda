"""The norm of all gradients, each entry counted once whatever is replicated, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.failures import naming_failures
from autopar.lower.compat import local_part_of, scale_in_place, tensor_norms
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.run.stage_map import StageMap
from autopar.placement import Axis, sharded_axes

__all__ = ["GradientNorm", "clip_gradients"]


def clip_gradients(
    gradients: Sequence[tuple[str, Tensor]],
    norm: GradientNorm,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scale `gradients`, by name, so that their joint p-norm is at most `max_norm`; see
    `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before, equal on all ranks.

    Raises:
        RuntimeError: `error_if_nonfinite` and the norm is not finite.
        ValueError: `norm_type` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be positive (inf for the largest entry)")
    locals_ = [local_part_of(gradient) for _, gradient in gradients]
    with torch.no_grad():
        norms = zip((name for name, _ in gradients), tensor_norms(locals_, norm_type), strict=True)
        total = norm.total(tuple(norms), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of the gradients is {total.item()}, so they can't be clipped. Pass "
            "error_if_nonfinite=False to scale by it anyway"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for local in locals_:
        by_dtype.setdefault(local.dtype, []).append(local)
    with torch.no_grad():
        for dtype, same in by_dtype.items():
            scale_in_place(same, scale.to(same[0].device, dtype))
    return total


@dataclass(frozen=True, eq=False)
class GradientNorm:
    """Joins the norms of the gradients that the ranks have parts of."""

    store: ParameterStore
    stages: StageMap
    communicator: Communicator

    def total(self, norms: Sequence[tuple[str, Tensor]], norm_type: float) -> Tensor:
        """The norm of all gradients of all ranks, which all call it with the norms of their parts, by parameter.

        Gradients sharded on the same axes are summed together over exactly these axes, and then all over the stages.
        A parameter that is tied across stages counts on the first group that has it.
        """
        groups: dict[tuple[Axis, ...], list[Tensor]] = {}
        for name, norm in norms:
            stored = self.store.stored[name]
            if stored.groups[0] == self.stages.group:
                groups.setdefault(sharded_axes(stored.layout, self.store.mesh), []).append(norm)
        totals = [_group_power(groups[axes], axes, self.communicator, norm_type) for axes in sorted(groups)]
        is_largest = math.isinf(norm_type)
        # float64 across stages, whatever the dtypes of each.
        dtype = torch.float64 if self.stages.is_pipeline else torch.float32
        joint = torch.zeros((), device=self.communicator.device, dtype=dtype)
        if totals:
            joined = torch.stack([t.to(totals[0].dtype) for t in totals])
            joint = joined.max() if is_largest else joined.sum()
        if self.stages.is_pipeline:
            joint = self.over_stages(joint.double(), "max" if is_largest else "sum")
        return joint if is_largest else joint.pow(1 / norm_type)

    def over_stages(self, x: Tensor, op: Literal["sum", "max"]) -> Tensor:
        """The sum or the largest of the scalars that the stages have."""
        with naming_failures(self.stages.who, "the sum of gradient norms over the stages"):
            return self.communicator.all_reduce(x, self.stages.axis, op)


def _group_power(norms: list[Tensor], axes: tuple[Axis, ...], communicator: Communicator, norm_type: float) -> Tensor:
    """The p-th power of the joint norm (for inf the norm itself) of these, over all their shards."""
    wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    joined = torch.stack([n.to(wide) for n in norms]).to(communicator.device)
    power = joined.max() if math.isinf(norm_type) else joined.pow(norm_type).sum()
    for axis in axes:
        power = communicator.all_reduce(power, axis, "max" if math.isinf(norm_type) else "sum")
    return power
