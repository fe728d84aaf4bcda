"""Where the user's parameters are: whole on every rank, unless they are DTensors."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import BackendError
from autopar.placement import REPLICATE, Layout, Placement, shard

__all__ = ["Stored", "stored_parameters"]

# Per parameter its name, the sizes of a mesh over all ranks, and its layout there.
Stored = tuple[tuple[str, tuple[int, ...], Layout], ...]


def stored_parameters(module: nn.Module, mesh: DeviceMesh) -> Stored:
    """Where the parameters of `module` lie.

    Raises:
        BackendError: a DTensor is on other ranks than `mesh`, or not cut into equal slices of its dims.
    """
    whole = (mesh.size(),)
    return tuple(
        (name, *_place(name, parameter, mesh)) if isinstance(parameter, DTensor) else (name, whole, (REPLICATE,))
        for name, parameter in module.named_parameters()
    )


def _place(name: str, parameter: DTensor, mesh: DeviceMesh) -> tuple[tuple[int, ...], Layout]:
    own = parameter.device_mesh
    if own.mesh.flatten().tolist() != mesh.mesh.flatten().tolist():
        raise BackendError(
            f"parameter {name!r} is a DTensor on the ranks {own.mesh.flatten().tolist()}, but options['mesh'] has "
            f"{mesh.mesh.flatten().tolist()}: pass the mesh that the parameters are distributed on"
        )
    layout: list[Placement] = []
    for placement, size in zip(parameter.placements, own.shape, strict=True):
        is_slice = type(placement) is Shard
        dim = placement.dim % parameter.dim() if isinstance(placement, Shard) else 0
        if type(placement) is not Replicate and not (is_slice and parameter.shape[dim] % size == 0):
            raise BackendError(
                f"parameter {name!r} is a DTensor of shape {list(parameter.shape)} with placement {placement} over "
                f"{size} ranks: autopar knows whole tensors and equal slices. Distribute it with Replicate() or "
                "Shard(dim) of a dim that divides, or pass it whole, as a plain tensor"
            )
        layout.append(shard(dim) if is_slice else REPLICATE)
    return tuple(own.shape), tuple(layout)
