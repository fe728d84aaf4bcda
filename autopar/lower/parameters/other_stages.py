"""Parameters of other pipeline stages: every rank has them, under their names and in their order, without elements.

Each rank runs the script that was written for one device.  Of a parameter that only other stages read, it has a DTensor
of the same shape, dtype and placements as theirs, whose local part is empty.  So loops over parameters, lists of
them for optimizers, and counts of elements are those of one device on all ranks, and what a function needs of such a
tensor comes from the ranks that hold it, which call the same function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import apply_forward
from autopar.lower.compat import from_torch_placement, local_part_of, local_tensor, tensor_norms
from autopar.placement import REPLICATE, Axis, Layout, mesh_axes, reshard

__all__ = ["StageTensors", "empty_part", "is_elsewhere", "layout_of"]


def is_elsewhere(x: Tensor | None) -> bool:
    """Whether it is a parameter, or of its shape, of which only ranks of other pipeline stages have elements.

    Parts of parameters are never empty otherwise: only dims that the devices divide are sharded.
    """
    return isinstance(x, DTensor) and local_tensor(x).numel() == 0 < x.numel()


def empty_part(x: Tensor) -> Tensor:
    """A local part without elements for a tensor like `x`, with as many dims where it can have any."""
    return x.new_empty((0, *x.shape[1:]))


@dataclass(frozen=True, eq=False)
class StageTensors:
    """Reads DTensors of pipeline stages; every rank of all stages calls each method, with its own parts.

    Args:
        mesh: the sizes of the axes of the DTensors' mesh, which is over the ranks of one stage.
        axis: across the device groups that have the stages.
        communicator: of this rank.
    """

    mesh: tuple[int, ...]
    axis: Axis
    communicator: Communicator

    def whole(self, x: DTensor) -> Tensor:
        """The whole plain tensor, from the first device group that has parts of it."""
        talk, is_here = self.communicator, not is_elsewhere(x)
        group = self.axis.coordinate(talk.rank)
        owner = talk.all_reduce(torch.tensor(float(-group if is_here else -self.axis.size), device=talk.device),
                                self.axis, "max")  # fmt: skip
        whole = torch.empty(x.shape, dtype=x.dtype, device=talk.device)
        if is_here:
            layout = layout_of(x)
            steps = reshard(layout, (REPLICATE,) * len(layout), self.mesh)
            whole = apply_forward(local_part_of(x).to(talk.device), steps, talk).contiguous()
        return talk.broadcast(whole, self.axis, -int(owner))

    def largest(self, x: Tensor) -> Tensor:
        """Entry by entry, the largest of the plain tensors that the stages have."""
        return self.communicator.all_reduce(x.to(self.communicator.device), self.axis, "max")

    def norms(self, tensors: Sequence[DTensor], order: float) -> list[Tensor]:
        """The p-norm of each whole tensor, p being `order`, which is positive, as plain scalars."""
        is_largest = math.isinf(order)
        powers = torch.stack([self._power(x, order) for x in tensors])
        by_axes: dict[tuple[Axis, ...], list[int]] = {}
        for place, x in enumerate(tensors):
            axes = zip(mesh_axes(self.mesh), layout_of(x), strict=True)
            by_axes.setdefault(tuple(a for a, p in axes if p.is_shard and a.size > 1), []).append(place)
        op = "max" if is_largest else "sum"
        for axes, places in sorted(by_axes.items()):
            own = powers[places]
            for axis in axes:
                own = self.communicator.all_reduce(own, axis, op)
            powers[places] = own
        if is_largest:
            joint = self.communicator.all_reduce(powers, self.axis, op)
        else:  # what several stages have, as it is tied, is the same on each
            holders = powers.new_tensor([float(not is_elsewhere(x)) for x in tensors])
            joint, holders = self.communicator.all_reduce(torch.stack([powers, holders]), self.axis, op)
            joint = (joint / holders).pow(1 / order)
        return [norm.to(x.dtype) for norm, x in zip(joint, tensors, strict=True)]

    def _power(self, x: DTensor, order: float) -> Tensor:
        if not local_part_of(x).numel():
            return torch.zeros((), dtype=torch.float64, device=self.communicator.device)
        norm = tensor_norms([local_part_of(x)], order)[0].double().to(self.communicator.device)
        return norm if math.isinf(order) else norm.pow(order)


def layout_of(x: DTensor) -> Layout:
    """Its placements, for its mesh."""
    untyped: Any = x
    placements = [from_torch_placement(placement, x.dim()) for placement in untyped.placements]
    return tuple(placement for placement in placements if placement is not None)
