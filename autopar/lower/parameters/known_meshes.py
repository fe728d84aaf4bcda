"""The meshes of parallel modules, whose DTensors mean whole tensors to whoever reads or changes them.

Ranks hold parts of a parameter, of its gradient, and of what is computed of them.  A script that was written for one
device reads numbers of these, and computes with them and plain tensors: it gets those of the whole tensor, on every
rank.  DTensors on other meshes are left to torch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autopar.lower.autograd import call_function, leaves_behind
from autopar.lower.communication.call_consensus import CallConsensus
from autopar.lower.compat import dtensor_like, full_tensor_by, item_by, local_tensor
from autopar.lower.parameters.other_stages import StageTensors, are_across_stages, is_elsewhere

__all__ = [
    "as_computed", "calls_of", "compare_plain", "finished", "has_local_inputs", "is_known", "is_of_stages", "is_whole",
    "know_mesh", "laid_as", "note_step", "placements_of", "read_whole", "set_apart", "share_largest", "share_whole",
    "stage_norms", "stage_state", "stages_of",
]  # fmt: skip


@dataclass
class _MeshUse:
    """A mesh, and the parallel modules that have parameters on it.

    Args:
        meshes: the mesh, and those that are equal to it, as results of ops may have any of these.
        is_whole_world: whether all ranks read what is on it: they are on the mesh, or have parameters of stages.
        stages: reads parameters of pipeline stages; None: what is on the mesh is whole there.
        calls: compares what the ranks do, if these are all; that of the latest module on every rank, even if
            the module is gone.
        modules: those with parameters on the mesh.
    """

    meshes: list[DeviceMesh]
    is_whole_world: bool
    stages: StageTensors | None = None
    calls: CallConsensus | None = None
    modules: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet[nn.Module])


_KNOWN: dict[int, _MeshUse] = {}  # by the mesh's id: results of ops have the mesh of their operands
_KNOWING = threading.RLock()  # simulated ranks are threads, and another may come to know a mesh while one looks


class _Apart(threading.local):
    """Whether this thread is in an optimizer step, in which each stage updates its own parameters by itself."""

    is_on: bool = False


_APART = _Apart()


def know_mesh(
    mesh: DeviceMesh,
    module: nn.Module | None,
    calls: CallConsensus | None,
    *,
    is_whole_world: bool = True,
    stages: StageTensors | None = None,
) -> None:
    """From now on DTensors on `mesh` are parts of whole tensors, which every rank reads and changes alike.

    With `is_whole_world` ranks that do something else are told; ranks of one of several pipeline stages are not
    compared in what they do with other tensors than parameters, nor are those of a mesh without a parallel module
    (`torch.compile`).
    """
    with _KNOWING:
        known = next((each for each in _KNOWN.values() if mesh == each.meshes[0]), None)
        known = _KNOWN.setdefault(id(mesh), known or _MeshUse([], is_whole_world))
        known.meshes.append(mesh)
        if module is not None:
            known.calls = calls if is_whole_world else None
            known.stages = stages
            known.modules.add(module)
    item_by(lambda x: read_whole(x) if is_known(x) else local_tensor(x))
    full_tensor_by(_full_tensor)


def set_apart(*, is_on: bool) -> None:
    """From now on each pipeline stage changes its own parameters by itself, or no longer."""
    _APART.is_on = is_on


def is_known(x: DTensor) -> bool:
    """Whether it is of a parallel module, or computed of what is."""
    return id(x.device_mesh) in _KNOWN


def stages_of(x: Tensor) -> StageTensors | None:
    """What reads `x`, of a parameter that pipeline stages have, on all ranks; None: each stage is by itself now, or it
    is no such tensor.
    """
    if _APART.is_on or not isinstance(x, DTensor):
        return None
    known = _KNOWN.get(id(x.device_mesh))
    return None if known is None else known.stages


def is_of_stages(x: DTensor) -> bool:
    """Whether it is of a module with pipeline stages, whose other stages have tensors that this rank does not."""
    known = _KNOWN[id(x.device_mesh)]
    return known.stages is not None or not known.is_whole_world


def has_local_inputs(x: DTensor) -> bool:
    """Whether `x` is made of parameters of a module that gets other plain tensors on each rank: the rows of its data
    rank.

    Modules that only wait to be collected have no say: ranks collect them at different times.
    """
    modules: Any = _KNOWN[id(x.device_mesh)].modules
    local = [module for module in modules if module.call_inputs is not None and module.call_inputs.is_local]
    parameters = {id(p) for module in local for p in module.parameters()}
    return bool(parameters) and any(id(leaf) in parameters for leaf in leaves_behind(x))


def is_whole(x: DTensor) -> bool:
    """Whether each rank of its mesh has all of it."""
    return all(each.is_replicate() for each in placements_of(x))


def read_whole(x: DTensor) -> Tensor:
    """The whole plain tensor, through which gradients reach `x`; every rank calls it, where ranks hold parts.

    Without gradients it may share the memory of `x`.
    """
    is_differentiable = x.requires_grad and torch.is_grad_enabled()
    calls, stages = calls_of(x), stages_of(x)
    if stages is not None:
        with _reading(calls), torch.no_grad():
            whole = stages.whole(x)
        return as_computed(x, whole) if is_differentiable else whole
    if is_whole(x):
        return x.full_tensor() if is_differentiable else local_tensor(x).detach()
    return x.full_tensor()


def finished(x: DTensor) -> DTensor:
    """`x`, of which each rank has a term or a part, with all of it on each; every rank calls it."""
    untyped: Any = x
    with _reading(calls_of(x)):
        return untyped.redistribute(untyped.device_mesh, [Replicate()] * untyped.device_mesh.ndim)


def _full_tensor(x: DTensor, own: Callable[[], Tensor]) -> Tensor:
    if not is_known(x):
        return own()
    if stages_of(x) is not None:
        return read_whole(x)
    if is_whole(x):
        return own()
    with _reading(calls_of(x)):
        return own()


def stage_norms(tensors: Sequence[DTensor], order: float) -> list[Tensor]:
    """The norms, of this positive order, of whole tensors of which pipeline stages have parts; every rank calls it."""
    stages = stages_of(tensors[0])
    assert stages is not None
    with _reading(calls_of(tensors[0]), f"norms of {len(tensors)} parameters or gradients"), torch.no_grad():
        return stages.norms(tensors, order)


def stage_state(own: Any, parameter: DTensor) -> Any:
    """What an optimizer has of a parameter of pipeline stages, whole; every rank calls it, with its own or None."""
    stages = stages_of(parameter)
    assert stages is not None
    with _reading(calls_of(parameter), "an optimizer's state"), torch.no_grad():
        return stages.state(own, parameter)


def share_largest(like: DTensor, x: Tensor) -> None:
    """Give `x`, a plain tensor, its largest values on all pipeline stages; every rank calls it."""
    stages = stages_of(like)
    if stages is not None:
        with _reading(calls_of(like), "what the stages found"), torch.no_grad():
            x.copy_(stages.largest(x))


def note_step(parameters: Iterable[Tensor], numbers: Sequence[float], what: str) -> None:
    """An optimizer updates `parameters`, with these hyperparameters; the next call tells whether all ranks did so.

    Those of pipeline stages are left out: optimizers of single parameters step on the ranks that have these.
    """
    meshes = {id(p.device_mesh) for p in parameters if isinstance(p, DTensor)}
    known = (_KNOWN[mesh] for mesh in meshes if mesh in _KNOWN)
    for calls in {each.calls for each in known if each.calls is not None and each.stages is None}:
        calls.records.note_step(numbers, what)


@contextmanager
def _reading(calls: CallConsensus | None, what: str = "a parameter or gradient") -> Generator[None]:
    """Inside, all ranks read this."""
    if calls is None:
        yield
        return
    calls.enter(f"reading {what} ({{}})", lambda: (None, ()))
    with calls.failing():
        yield


def compare_plain(like: DTensor, tensors: Sequence[Tensor]) -> None:
    """Raise MeshError if ranks are about to change `like` by plain tensors that differ; every rank calls it."""
    calls = calls_of(like)
    if calls is not None and tensors:
        named = [(f"plain tensor {number}", x) for number, x in enumerate(tensors)]
        calls.enter("changing a parameter by plain tensors ({})", lambda: (None, named))


def share_whole(whole: Tensor, like: DTensor) -> DTensor:
    """What the first rank of the mesh has as `whole`, laid out as `like`; every rank calls it, with a tensor of its
    own, such as random numbers.
    """
    calls = calls_of(like)
    if calls is not None:
        calls.enter("drawing random numbers like a parameter ({})", lambda: (None, ()))
    if is_elsewhere(like):
        return laid_as(whole, like)
    return distribute_tensor(whole.detach(), like.device_mesh, placements_of(like))


def laid_as(x: Tensor, like: DTensor) -> DTensor:
    """`x`, of the shape of `like`, laid out as it is, without gradient.  A plain tensor is the same on every rank."""
    if isinstance(x, DTensor):
        untyped: Any = x
        if stages_of(like) is not None and stages_of(x) is not None and are_across_stages([x, like]):
            return laid_as(read_whole(untyped.detach()), like)
        if placements_of(x) == placements_of(like):
            if untyped.device_mesh == like.device_mesh:
                return x
            if torch.equal(untyped.device_mesh.mesh, like.device_mesh.mesh):  # takes longer: the ranks are computed
                return dtensor_like(local_tensor(x).detach(), like)
        if untyped.device_mesh == like.device_mesh and stages_of(like) is None:
            return untyped.detach().redistribute(like.device_mesh, placements_of(like))
        x = read_whole(untyped.detach())
    if is_elsewhere(like):
        return dtensor_like(local_tensor(like).new_empty(local_tensor(like).shape, dtype=x.dtype), like)
    whole = x.detach().to(local_tensor(like).device)
    return distribute_tensor(whole, like.device_mesh, placements_of(like), src_data_rank=None)


def placements_of(x: DTensor) -> tuple[Any, ...]:
    """How it is cut, by axis of its mesh."""
    untyped: Any = x
    return tuple(untyped.placements)


def as_computed(part: DTensor, whole: Tensor) -> Tensor:
    """A whole tensor as if computed of the parameter `part` of which it is; every rank has the same gradient of it."""
    return call_function(_Whole, part, whole)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: DTensor, whole: Tensor) -> Tensor:
        ctx.like = part
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return laid_as(gradient, ctx.like), None


def calls_of(x: DTensor) -> CallConsensus | None:
    """What compares the calls of the ranks that have parts of `x`, if these are all."""
    known = _KNOWN[id(x.device_mesh)]
    return None if known.stages is not None and _APART.is_on else known.calls
