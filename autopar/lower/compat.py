"""Every private or version-dependent torch API that `lower` needs, each behind a small function."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.errors import MeshError
from autopar.placement import Layout

__all__ = [
    "local_tensor",
    "make_dtensor",
    "make_mesh",
    "start_all_gather",
    "start_reduce_scatter",
    "to_torch_placements",
]


def start_all_gather(result: Tensor, x: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gather the members' `x` into `result` (``[size, *x.shape]``), both contiguous; renamed in torch 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(result.view(-1), x.view(-1), group=group, async_op=True)


def start_reduce_scatter(result: Tensor, stack: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Leave the own entry of the members' summed `stack` in `result`, both contiguous; renamed in torch 2.13."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(result.view(-1), stack.view(-1), group=group, async_op=True)


def make_mesh(
    sizes: tuple[int, ...], ranks: Sequence[int], device_type: str, *, rank: int | None = None
) -> DeviceMesh:
    """A DeviceMesh of these axis sizes over `ranks`, row-major.

    With `rank` (the process rank that it is for) no process group is touched or needed; operations that
    communicate then fail.  Without, its groups are created: call it on every process of `ranks`.

    Raises:
        MeshError: `ranks` descend along an axis, and this torch sorts the ranks of a group (before 2.13), so
            that DTensor would join slices in the wrong order.
    """
    layout = torch.tensor(list(ranks), dtype=torch.int).view(sizes)
    if rank is not None:
        return DeviceMesh(device_type, layout, _init_backend=False, _rank=rank)
    is_sorted = all(bool((layout.diff(dim=dim) > 0).all()) for dim in range(layout.ndim))
    if is_sorted and len(ranks) == dist.get_world_size():
        return DeviceMesh(device_type, layout)
    groups = [_open_group(_members(layout, dim), is_sorted) for dim in range(layout.ndim)]
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type)
    names = tuple(f"axis_{dim}" for dim in range(layout.ndim))
    return DeviceMesh.from_group(groups, device_type, layout, mesh_dim_names=names)


def _members(layout: Tensor, dim: int) -> list[int]:
    """The ranks that share axis `dim` of the mesh with this process."""
    columns = layout.movedim(dim, -1).flatten(0, -2).tolist() if layout.ndim > 1 else [layout.tolist()]
    (own,) = [column for column in columns if dist.get_rank() in column]
    return own


def _open_group(members: list[int], is_sorted: bool) -> dist.ProcessGroup:
    options: dict[str, bool] = {} if is_sorted else {"sort_ranks": False}
    if not is_sorted and "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise MeshError(f"the ranks {members} along an axis of the mesh descend, which needs torch 2.13: "
                        "order the devices of the mesh so that ranks ascend along every axis")
    # only the members take part
    group = dist.new_group(members, use_local_synchronization=True, **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def to_torch_placements(layout: Layout) -> tuple[TorchPlacement, ...]:
    """DTensor placements of a storage layout; what is not sharded is whole."""
    return tuple(Shard(placement.dim) if placement.is_shard else Replicate() for placement in layout)


def make_dtensor(
    local: Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int], stride: Sequence[int] | None = None
) -> DTensor:
    """The DTensor of global `shape` whose local part is `local`, without communication.

    It shares `local`'s storage.  `stride` is the global one, row-major by default.
    """
    if stride is None:
        stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        local.detach(),
        mesh,
        to_torch_placements(layout),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def local_tensor(x: DTensor) -> Tensor:
    """The local part itself, outside autograd (``to_local`` makes a view that takes part in it)."""
    return x._local_tensor  # pyright: ignore[reportPrivateUsage]
