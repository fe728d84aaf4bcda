"""The meshes of parallel modules, whose DTensors mean whole tensors to whoever reads or changes them.

Ranks hold parts of a parameter, of its gradient, and of what is computed of them.  A script that was written for one
device reads numbers of these, and computes with them and plain tensors: it gets those of the whole tensor, on every
rank.  DTensors on other meshes are left to torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.lower.communication.call_consensus import CallConsensus
from autopar.lower.compat import item_by, local_tensor

__all__ = [
    "compare_plain", "has_local_inputs", "is_known", "is_of_a_stage", "is_on_all_ranks", "know_mesh", "laid_as",
    "placements_of", "read_whole", "share_whole",
]  # fmt: skip


@dataclass
class _Known:
    """A mesh, and the parallel modules that have parameters on it.

    Args:
        mesh: the mesh.
        is_whole_world: whether all ranks are in it, rather than those of a pipeline stage.
        calls: compares what the ranks do, if it is the whole world; that of the latest module on every rank, even if
            the module is gone.
        modules: those with parameters on the mesh.
    """

    mesh: DeviceMesh
    is_whole_world: bool
    calls: CallConsensus | None = None
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet[nn.Module])


_KNOWN: dict[int, _Known] = {}  # by the mesh's id: results of ops have the mesh of their operands


def know_mesh(mesh: DeviceMesh, module: nn.Module | None, calls: CallConsensus | None, *, is_whole_world: bool) -> None:
    """From now on DTensors on `mesh` are parts of whole tensors, which every rank reads and changes alike.

    With `is_whole_world` ranks that do something else are told; the ranks of one of several pipeline stages are not
    compared, as each has parameters of its own, nor are those of a mesh without a parallel module (`torch.compile`).
    """
    known = _KNOWN.setdefault(id(mesh), _Known(mesh, is_whole_world))
    if module is not None:
        known.calls = calls if is_whole_world else None
        known.modules.add(module)
    item_by(lambda x: read_whole(x) if is_known(x) else local_tensor(x))


def is_known(x: DTensor) -> bool:
    """Whether it is of a parallel module, or computed of what is."""
    return id(x.device_mesh) in _KNOWN


def is_on_all_ranks(x: Tensor) -> bool:
    """Whether it is a known DTensor that all ranks share, and not those of a pipeline stage."""
    return isinstance(x, DTensor) and is_known(x) and _KNOWN[id(x.device_mesh)].is_whole_world


def is_of_a_stage(x: Tensor) -> bool:
    """Whether it is a known DTensor of a pipeline stage, which other ranks don't have."""
    return isinstance(x, DTensor) and is_known(x) and not is_on_all_ranks(x)


def has_local_inputs(x: DTensor) -> bool:
    """Whether plain tensors may be other ones on each rank: the rows of its data rank."""
    modules: Any = _KNOWN[id(x.device_mesh)].modules
    return any(module.call_inputs is not None and module.call_inputs.is_local for module in modules)


def read_whole(x: DTensor) -> Tensor:
    """The whole plain tensor, through which gradients reach `x`; every rank calls it, where ranks hold parts.

    Without gradients it may share the memory of `x`.
    """
    is_differentiable = x.requires_grad and torch.is_grad_enabled()
    if all(each.is_replicate() for each in placements_of(x)):
        return x.full_tensor() if is_differentiable else local_tensor(x).detach()
    calls = _calls(x)
    if calls is None:
        return x.full_tensor()
    calls.enter("reading a parameter or gradient ({})", lambda: (None, ()))
    with calls.failing():
        return x.full_tensor()


def compare_plain(like: DTensor, tensors: Sequence[Tensor]) -> None:
    """Raise MeshError if ranks are about to change `like` by plain tensors that differ; every rank calls it."""
    calls = _calls(like)
    if calls is not None and tensors:
        named = [(f"plain tensor {number}", x) for number, x in enumerate(tensors)]
        calls.enter("changing a parameter by plain tensors ({})", lambda: (None, named))


def share_whole(whole: Tensor, like: DTensor) -> DTensor:
    """What the first rank of the mesh has as `whole`, laid out as `like`; every rank calls it, with a tensor of its
    own, such as random numbers.
    """
    calls = _calls(like)
    if calls is not None:
        calls.enter("drawing random numbers like a parameter ({})", lambda: (None, ()))
    return distribute_tensor(whole.detach(), like.device_mesh, placements_of(like))


def laid_as(x: Tensor, like: DTensor) -> DTensor:
    """`x`, of the shape of `like`, laid out as it is, without gradient.  A plain tensor is the same on every rank."""
    if isinstance(x, DTensor):
        untyped: Any = x
        if untyped.device_mesh is like.device_mesh:
            is_laid = placements_of(x) == placements_of(like)
            return x if is_laid else untyped.detach().redistribute(like.device_mesh, placements_of(like))
        x = read_whole(untyped.detach())
    whole = x.detach().to(local_tensor(like).device)
    return distribute_tensor(whole, like.device_mesh, placements_of(like), src_data_rank=None)


def placements_of(x: DTensor) -> tuple[Any, ...]:
    """How it is cut, by axis of its mesh."""
    untyped: Any = x
    return tuple(untyped.placements)


def _calls(x: DTensor) -> CallConsensus | None:
    return _KNOWN[id(x.device_mesh)].calls
