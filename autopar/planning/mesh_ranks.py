"""The processes of a mesh, and the one that reports progress to the user."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import MeshError
from autopar.user_text.suggestions import kind_of

__all__ = ["is_first_rank", "mesh_ranks"]


def mesh_ranks(mesh: Any) -> list[int]:
    """The processes of `mesh` in its order.

    Raises:
        MeshError: it is no DeviceMesh, or names a process that there is not, or one twice.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"mesh is {kind_of(mesh)}: pass a DeviceMesh, for instance "
            "torch.distributed.device_mesh.init_device_mesh('cuda', (8,))"
        )
    here = torch.accelerator.current_accelerator(check_available=True)
    if mesh.device_type != "cpu" and (here is None or here.type != mesh.device_type):
        raise MeshError(
            f"the mesh is of {mesh.device_type!r} devices, but torch {torch.__version__} sees none here: install a "
            "torch that is built for them on a machine that has them, or use init_device_mesh('cpu', ...)"
        )
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    world = dist.get_world_size() if dist.is_initialized() else 1
    if dist.is_initialized() and (max(ranks) >= world or len(set(ranks)) < len(ranks)):
        raise MeshError(
            f"the mesh has the ranks {ranks}, but there are {world} processes, 0 to {world - 1}, each to be "
            "named once: start as many processes as the mesh has devices, or make a smaller mesh"
        )
    return ranks


def is_first_rank() -> bool:
    """Whether this process is the first of all, or the only one."""
    return not dist.is_initialized() or dist.get_rank() == 0
