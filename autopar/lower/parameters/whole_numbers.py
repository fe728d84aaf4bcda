"""Numbers of parameters and gradients: ``p.grad.norm().item()`` is that of the whole tensor, on every rank.

Ranks hold parts of a norm, a sum or a largest entry of a DTensor, and torch's ``item()`` gives each rank the number of
its own part.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.lower.communication.call_consensus import CallConsensus
from autopar.lower.compat import item_by, local_tensor

__all__ = ["give_whole_numbers"]

# By mesh, as other meshes in this process are not ours; equal ones have the same ranks.
_CALLS: dict[DeviceMesh, weakref.ReferenceType[CallConsensus] | None] = {}


def give_whole_numbers(mesh: DeviceMesh, calls: CallConsensus, *, is_whole_world: bool) -> None:
    """Have ``item()``, ``float()`` and the like of DTensors on `mesh` be of whole tensors; every rank must call them.

    With `is_whole_world` ranks that do something else are told; the ranks of one of several pipeline stages are not
    compared, as each has parameters of its own.
    """
    _CALLS[mesh] = weakref.ref(calls) if is_whole_world else None
    item_by(_whole)


def _whole(x: DTensor) -> Tensor:
    untyped: Any = x
    if x.device_mesh not in _CALLS or all(each.is_replicate() for each in untyped.placements):
        return local_tensor(x)
    reference = _CALLS[x.device_mesh]
    calls = None if reference is None else reference()
    if calls is None:
        return x.full_tensor()
    calls.enter("reading a number of a parameter or gradient ({})", lambda: (None, ()))
    with calls.failing():
        return x.full_tensor()
