"""Every private or version-dependent torch API that `lower` needs, each behind a small function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

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
    communicate then fail.  Without, its groups are created: call it on every process.
    """
    layout = torch.tensor(list(ranks), dtype=torch.int).view(sizes)
    if rank is None:
        return DeviceMesh(device_type, layout)
    return DeviceMesh(device_type, layout, _init_backend=False, _rank=rank)


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
