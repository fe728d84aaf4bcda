"""Parameters of other pipeline stages: every rank has them, under their names and in their order, without elements.

Each rank runs the script that was written for one device.  Of a parameter that only other stages read, it has a DTensor
of the same shape, dtype and placements as theirs, whose local part is empty.  So loops over parameters, lists of
them for optimizers, and counts of elements are those of one device on all ranks, and what a function needs of such a
tensor comes from the ranks that hold it, which call the same function.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import whole_copy
from autopar.lower.compat import (
    from_torch_placement,
    leaves_of,
    local_part_of,
    local_tensor,
    map_leaves,
    tensor_norms,
)
from autopar.placement import Axis, Layout, sharded_axes

__all__ = [
    "StageTensors", "TensorForm", "are_across_stages", "empty_part", "holders_of", "is_elsewhere", "layout_of",
    "note_holders", "share_object",
]  # fmt: skip

_HOLDERS = "autopar_holders"
"""The attribute of a DTensor that is the device groups that have parts of it: ranks of other groups know it, too."""


def is_elsewhere(x: Tensor | None) -> bool:
    """Whether it is a parameter, or of its shape, of which only ranks of other pipeline stages have elements.

    Parts of parameters are never empty otherwise: only dims that the devices divide are sharded.
    """
    return isinstance(x, DTensor) and local_tensor(x).numel() == 0 < x.numel()


def empty_part(x: Tensor) -> Tensor:
    """A local part without elements for a tensor like `x`, with as many dims where it can have any."""
    return x.new_empty((0, *x.shape[1:]))


def note_holders(x: Tensor, groups: tuple[int, ...] | None) -> None:
    """`x`, a parameter or what was computed of it entry by entry, has its entries on these device groups."""
    if groups is not None:
        vars(x)[_HOLDERS] = groups


def holders_of(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The device groups that hold these, if all of them are known and the same."""
    known = {vars(x).get(_HOLDERS) for x in tensors}
    return known.pop() if len(known) == 1 else None


def are_across_stages(tensors: Sequence[Tensor]) -> bool | None:
    """Whether these, of pipeline stages, lie on different stages; None: they do, but only ranks of these know."""
    known = {vars(x).get(_HOLDERS) for x in tensors}
    if None not in known:
        return len(known) > 1
    return None if len(set(map(is_elsewhere, tensors))) > 1 else False


@dataclass(frozen=True)
class TensorForm:
    """The form of a tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_host: bool

    @classmethod
    def of(cls, x: Any) -> Any:
        """That of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        return cls(tuple(x.shape), x.dtype, x.device.type == "cpu" and not isinstance(x, DTensor))


def share_object(own: Any, axis: Axis, owner: int, communicator: Communicator) -> Any:
    """What the rank with coordinate `owner` on `axis` has, on every rank of it; every rank calls it."""
    text = pickle.dumps(own)
    length = communicator.broadcast(torch.tensor(len(text), device=communicator.device), axis, owner)
    padded = bytearray(text.ljust(int(length), b"\0")[: int(length)])
    sent = torch.frombuffer(padded, dtype=torch.uint8).to(communicator.device)
    came: Any = communicator.broadcast(sent, axis, owner).cpu()
    return pickle.loads(bytes(came.tolist()))


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
        return self._shared(TensorForm.of(x), None if is_elsewhere(x) else x, self._holder(x))

    def state(self, own: Any, parameter: DTensor) -> Any:
        """What an optimizer has of a parameter where that has parts, with whole plain tensors; `own` is this rank's."""
        owner, is_here = self._holder(parameter), not is_elsewhere(parameter)
        form = share_object(map_leaves(TensorForm.of, own), self.axis, owner, self.communicator)
        leaves: Iterator[Any] = iter(leaves_of(own) if is_here else ())

        def shared(entry: Any) -> Any:
            x = next(leaves, None)
            return self._shared(entry, x, owner) if isinstance(entry, TensorForm) else entry

        return map_leaves(shared, form)

    def _holder(self, x: DTensor) -> int:
        """The first device group that has parts of it."""
        place = self.axis.size if is_elsewhere(x) else self.axis.coordinate(self.communicator.rank)
        first = torch.tensor(-float(place), device=self.communicator.device)
        return -int(self.communicator.all_reduce(first, self.axis, "max"))

    def _shared(self, form: TensorForm, x: Tensor | None, owner: int) -> Tensor:
        """The whole of a tensor of this form that a device group has; `x` is this rank's, None where there is none."""
        talk = self.communicator
        if isinstance(x, DTensor):
            whole = whole_copy(local_part_of(x), layout_of(x), self.mesh, talk)
        elif x is not None:
            whole = x.to(talk.device)
        else:
            whole = torch.empty(form.shape, dtype=form.dtype, device=talk.device)
        whole = talk.broadcast(whole, self.axis, owner)
        return whole.cpu() if form.is_on_host else whole

    def largest(self, x: Tensor) -> Tensor:
        """Entry by entry, the largest of the plain tensors that the stages have."""
        return self.communicator.all_reduce(x.to(self.communicator.device), self.axis, "max")

    def norms(self, tensors: Sequence[DTensor], order: float) -> list[Tensor]:
        """The p-norm of each whole tensor, p being `order`, which is positive, as plain scalars."""
        is_largest = math.isinf(order)
        powers = torch.stack([self._power(x, order) for x in tensors])
        by_axes: dict[tuple[Axis, ...], list[int]] = {}
        for place, x in enumerate(tensors):
            by_axes.setdefault(sharded_axes(layout_of(x), self.mesh), []).append(place)
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
