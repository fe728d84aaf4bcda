"""A script that averages gradients over ranks by itself, as those without DDP do, trains as on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import ModelError
from tests.end_to_end.harness import launch, whole_mesh

pytestmark = pytest.mark.slow


def made() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).double()
    return model, torch.randn(8, 16).double(), torch.randn(8, 8).double()


def train(model: Any, x: Tensor, y: Tensor, average: Any) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        average(model)
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.item())
    return losses


def by_parameter(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def at_once(model: nn.Module) -> None:
    """Through ``.data``, all at a time, and waited for afterwards."""
    gradients: list[Any] = [p.grad for p in model.parameters()]
    works = [dist.all_reduce(g.data, op=dist.ReduceOp.SUM, async_op=True) for g in gradients]
    for work, g in zip(works, gradients, strict=True):
        assert work is not None
        work.wait()
        g.data.mul_(1 / dist.get_world_size())


def in_buckets(model: nn.Module) -> None:
    untyped: Any = torch
    gradients: list[Any] = [p.grad for p in model.parameters()]
    flat = untyped._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, averaged in zip(gradients, untyped._utils._unflatten_dense_tensors(flat, gradients), strict=True):
        g.copy_(averaged)


def check(constraints: tuple[str, ...], expected: list[float]) -> None:
    for average in (by_parameter, at_once, in_buckets):
        model, x, y = made()
        model = autopar.parallelize(model, whole_mesh(), (x,), profile=False, constraints=constraints)
        torch.testing.assert_close(train(model, x, y, average), expected, rtol=1e-9, atol=0)
    weight: Any = model.get_parameter("0.weight")
    whole, copies = weight.full_tensor().detach().clone(), [torch.empty(64, 16).double() for _ in range(2)]
    dist.all_gather(copies, weight.detach())
    assert all(torch.equal(each, whole) for each in copies)
    with torch.no_grad():
        weight.data.mul_(2)
        dist.broadcast(weight.data, 0)
    torch.testing.assert_close(weight.full_tensor(), whole * 2, rtol=0, atol=0)
    with pytest.raises(ModelError, match=r"torch\.distributed\.reduce writes to a parameter or gradient"):
        dist.reduce(weight.data, 0)


def test_gradients_that_a_script_averages_are_those_of_one_device() -> None:
    expected = train(*made(), average=lambda _: None)
    constraints = (("data=2", "zero=0"), ("zero=3",), ("tensor=2",), ("pipeline=2",))
    launch(2, *(partial(check, each, expected) for each in constraints))
