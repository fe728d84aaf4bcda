"""Where the user's tensors are: whole on every rank, unless they are DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.backend.dynamo_graph import CapturedGraph, Expected
from autopar.errors import BackendError
from autopar.lower.compat import from_torch_placement
from autopar.placement import REPLICATE, Layout, Placement
from autopar.planning.mesh_ranks import mesh_ranks

__all__ = ["Stored", "as_expected", "stored_parameters", "with_whole_inputs"]

# Per parameter its name, the sizes of a mesh over all ranks, and its layout there.
Stored = tuple[tuple[str, tuple[int, ...], Layout], ...]


def stored_parameters(module: nn.Module, mesh: DeviceMesh, *, shards: bool) -> Stored:
    """How the parameters of `module` are stored; with `shards`, where nothing else is to be chosen.

    Raises:
        BackendError: a DTensor is on other ranks than `mesh`, or not cut into equal slices of its dims.
    """
    whole = (mesh.size(),)
    return tuple(
        (name, *_place(name, parameter, mesh)) if isinstance(parameter, DTensor) else (name, whole, (REPLICATE,))
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor) or not shards
    )


def _place(name: str, parameter: DTensor, mesh: DeviceMesh) -> tuple[tuple[int, ...], Layout]:
    own = parameter.device_mesh
    if mesh_ranks(own) != mesh_ranks(mesh):
        raise BackendError(
            f"parameter {name!r} is a DTensor on the ranks {mesh_ranks(own)}, but options['mesh'] has "
            f"{mesh_ranks(mesh)}: pass the mesh that the parameters are distributed on"
        )
    layout: list[Placement] = []
    for placement, size in zip(parameter.placements, own.shape, strict=True):
        known = from_torch_placement(placement, parameter.ndim)
        if known is None or (known.is_shard and parameter.shape[known.dim] % size):
            raise BackendError(
                f"parameter {name!r} is a DTensor of shape {list(parameter.shape)} with placement {placement} over "
                f"{size} ranks: autopar knows whole tensors and equal slices. Distribute it with Replicate() or "
                "Shard(dim) of a dim that divides, or pass it whole, as a plain tensor"
            )
        layout.append(known)
    return tuple(own.shape), tuple(layout)


def with_whole_inputs(graph: CapturedGraph, values: Sequence[Any]) -> list[Any]:
    """The arguments, with inputs that are DTensors made whole; differentiable."""
    result = list(values)
    for place in graph.places("input"):
        if isinstance(result[place], DTensor):
            result[place] = result[place].full_tensor()
    return result


def as_expected(output: Tensor, expected: Expected) -> Tensor:
    """A whole output in the form that Dynamo expects of the graph; pending sums are finished first."""
    output = output.to(expected.dtype)
    if expected.mesh is None:
        return output.full_tensor() if isinstance(output, DTensor) else output
    whole = [Replicate()] * expected.mesh.ndim
    placements = [Replicate() if placement.is_partial() else placement for placement in expected.placements]
    return DTensor.from_local(output, expected.mesh, whole, run_check=False).redistribute(placements=placements)
