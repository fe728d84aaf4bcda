"""Parameters as DTensors on one mesh: made without communication, trained by torch.optim."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.lower.compat import local_tensor, make_dtensor, make_mesh
from autopar.placement import BROADCAST, REPLICATE, Layout, local_shape, mesh_axes, shard
from tests.ranks import run_alone, run_ranks

STORED: tuple[tuple[tuple[int, ...], Layout], ...] = (
    ((8, 4), (shard(0), shard(0), shard(0))),
    ((8, 4), (shard(0), shard(1), REPLICATE)),
    ((4, 8), (REPLICATE, shard(1), shard(0))),
    ((8,), (REPLICATE, BROADCAST, REPLICATE)),
    ((2, 4, 2), (shard(1), REPLICATE, shard(2))),
)
OPTIMIZERS = {
    "adamw foreach": (torch.optim.AdamW, {"foreach": True, "lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"foreach": False, "lr": 0.1}),
    "adamw fused": (torch.optim.AdamW, {"fused": True, "lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"foreach": True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


def slice_of(whole: Tensor, layout: Layout, mesh: tuple[int, ...], rank: int) -> Tensor:
    for placement, axis in zip(layout, mesh_axes(mesh), strict=True):
        if placement.is_shard:
            whole = whole.chunk(axis.size, placement.dim)[axis.coordinate(rank)]
    return whole.contiguous()


def wholes_and_gradients(num_axes: int) -> list[tuple[Tensor, list[Tensor], Layout]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(3)],
         layout[:num_axes])
        for shape, layout in STORED
    ]  # fmt: skip


def train_locally(rank: int, mesh_sizes: tuple[int, ...], mesh, name: str) -> list[Tensor]:
    """Local parts of the parameters after three steps of the optimizer."""
    cases = wholes_and_gradients(len(mesh_sizes))

    def distribute(whole: Tensor, layout: Layout) -> DTensor:
        return make_dtensor(slice_of(whole, layout, mesh_sizes, rank), mesh, layout, whole.shape)

    parameters = [nn.Parameter(distribute(whole, layout)) for whole, _, layout in cases]
    kind, options = OPTIMIZERS[name]
    optimizer = kind(parameters, **options)
    for step in range(3):
        for parameter, (_, gradients, layout) in zip(parameters, cases, strict=True):
            parameter.grad = distribute(gradients[step], layout)
        optimizer.step()
        optimizer.zero_grad()
    for parameter, (whole, _, layout) in zip(parameters, cases, strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.shape == whole.shape
        assert local_tensor(parameter).shape == local_shape(tuple(whole.shape), layout, mesh_sizes)
    return [local_tensor(parameter).detach() for parameter in parameters]


def check_training(rank: int, mesh_sizes: tuple[int, ...], name: str, got: list[Tensor]) -> None:
    cases = wholes_and_gradients(len(mesh_sizes))
    parameters = [nn.Parameter(whole.clone()) for whole, *_ in cases]
    kind, options = OPTIMIZERS[name]
    optimizer = kind(parameters, **options)
    for step in range(3):
        for parameter, (_, gradients, _) in zip(parameters, cases, strict=True):
            parameter.grad = gradients[step].clone()
        optimizer.step()
    for parameter, (*_, layout), local in zip(parameters, cases, got, strict=True):
        torch.testing.assert_close(local, slice_of(parameter.detach(), layout, mesh_sizes, rank))


def train_without_a_process_group(names: list[str]) -> bool:
    """Whether there is one in the end."""
    mesh_sizes = (2, 2, 2)
    # One rank after the other: none communicates, and DTensor remembers what it knows of an op by thread.
    # `test_submodule_calls` and others step DTensors in several threads.
    for name in names:
        for rank in (0, 5):  # whose coordinates differ on two of the axes
            mesh = make_mesh(mesh_sizes, range(8), "cpu", rank=rank)
            check_training(rank, mesh_sizes, name, train_locally(rank, mesh_sizes, mesh, name))
    return dist.is_initialized()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("names", [["adamw foreach"], [name for name in OPTIMIZERS if name != "adamw foreach"]])
def test_optimizers_train_dtensors_without_a_process_group(names: list[str]):
    assert run_alone(train_without_a_process_group, names) is False


def test_a_dtensor_shares_the_storage_of_its_local_part():
    mesh = make_mesh((2,), range(2), "cpu", rank=1)
    local = torch.zeros(2, 3)
    made = make_dtensor(local, mesh, (shard(0),), (4, 3))
    assert local_tensor(made).data_ptr() == local.data_ptr()
    assert made.stride() == (3, 1)
    with torch.no_grad():
        nn.Parameter(made).add_(1)
    assert torch.equal(local, torch.ones(2, 3))


def test_a_mesh_of_permuted_ranks_without_process_group():
    mesh = make_mesh((2, 2), [3, 1, 0, 2], "cpu", rank=0)
    assert mesh.mesh.tolist() == [[3, 1], [0, 2]]
    assert tuple(mesh.get_coordinate()) == (1, 0)


def in_order_if_needed(ranks: list[int]) -> list[int]:
    """`ranks`, ascending where torch (before 2.13) sorts the ranks of a group."""
    return ranks if "sort_ranks" in inspect.signature(dist.new_group).parameters else sorted(ranks)


def gloo_training(name: str) -> list[list[float]]:
    mesh_sizes = (2, 2)
    ranks = in_order_if_needed([1, 0, 3, 2])
    rank = ranks.index(dist.get_rank())
    mesh = make_mesh(mesh_sizes, ranks, "cpu")
    check_training(rank, mesh_sizes, name, train_locally(rank, mesh_sizes, mesh, name))
    whole = torch.arange(32.0).view(8, 4)
    layout = (shard(0), shard(1))
    made = make_dtensor(slice_of(whole, layout, mesh_sizes, rank), mesh, layout, whole.shape)
    return made.full_tensor().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw foreach", "sgd momentum"])
def test_optimizers_train_dtensors_on_gloo(name: str):
    assert run_ranks(gloo_training, 4, name) == [torch.arange(32.0).view(8, 4).tolist()] * 4


def gloo_subset_mesh() -> list[float]:
    if dist.get_rank() not in (3, 1):
        return []
    mesh = make_mesh((2,), in_order_if_needed([3, 1]), "cpu")
    local = torch.tensor([float(dist.get_rank())])
    return make_dtensor(local, mesh, (shard(0),), (2,)).full_tensor().tolist()


@pytest.mark.slow
def test_a_mesh_over_some_processes_in_any_order():
    expected = [float(rank) for rank in in_order_if_needed([3, 1])]
    assert run_ranks(gloo_subset_mesh, 4) == [[], expected, [], expected]
