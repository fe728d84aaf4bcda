"""A kernel that splits an op's factor is a record in a file of `ops`, and a function in a file of `lower/kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels import KERNELS
from autopar.lower.program import layer_ops
from autopar.ops import family_of, losses, own_families, registry, views
from autopar.ops.family import Kernel, OpFamily, Types
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.program import KernelCollective, Op, Program
from autopar.search import SearchRequest, search
from tests.layer_costs import layer_collectives
from tests.zoo import assert_parity, quick_prices, trained_alone

PRODUCT = "testlib.product.default"

# ---------------------------------------------------------------- file 1: the record


def _sends(op: Op, operands: Types) -> tuple[KernelCollective, ...]:
    """The result, as it is here, to every other device in turn; results count on behind the two operands."""
    return (KernelCollective("send", "forward", 2, dtype=operands[0].dtype, is_ring=True),)


FAMILIES = (
    OpFamily(
        {PRODUCT: "_ k, k _ -> _ _ | by k ring_product"},
        is_cheap=False,
        kernels={"ring_product": Kernel(_sends)},
        count_work=family_of("aten.mm.default").count_work,
    ),
)

# ---------------------------------------------------------------- file 2: the kernel


class _RingProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        total = a @ b
        for axis in shards.axes:
            total = _sum_in_a_ring(shards.communicator, axis, total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return None, gradients[0] @ b.T, a.T @ gradients[0]


def ring_product(shards: Shards, a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` from this device's columns and rows, whole on every device."""
    return _RingProduct.apply(shards, a, b)


def _sum_in_a_ring(communicator: Communicator, axis: Axis, own: Tensor) -> Tensor:
    """The members' sum, added up in their order on each of them."""
    coordinate = axis.coordinate(communicator.rank)
    terms = {coordinate: own}
    passed = own
    for step in range(1, axis.size):
        sent = communicator.start_send(passed, axis, (coordinate + 1) % axis.size)
        passed = communicator.start_receive(own.shape, own.dtype, axis, (coordinate - 1) % axis.size).wait()
        sent.wait()
        terms[(coordinate - step) % axis.size] = passed
    return torch.stack([terms[index] for index in range(axis.size)]).sum(0)


# ---------------------------------------------------------------- the test


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Parameter(torch.randn(64, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.ops.testlib.product(torch.tanh(self.up(x)), self.down) - x).square().mean()


@pytest.fixture
def _files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the two files were in their folders, which look for them."""
    with torch.library._scoped_library("testlib", "FRAGMENT") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", lambda a, b: a @ b, "CompositeExplicitAutograd")
        torch.library.register_fake("testlib::product", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=library)
        torch.library.register_autograd(
            "testlib::product",
            lambda ctx, g: (g @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ g),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=library,
        )
        monkeypatch.setattr(registry, "_registered", {PRODUCT: FAMILIES[0]})
        monkeypatch.setattr(layer_ops, "KERNELS", {**KERNELS, "ring_product": ring_product})
        yield


def planned(program: Program, world_size: int, *constraints: str) -> Plan:
    return search(program, world_size, quick_prices(world_size), SearchRequest(constraints=constraints))


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize(("world_size", "mesh"), [(2, "2"), (4, "4"), (4, "2x2")])
def test_a_new_kernel_is_two_files(world_size: int, mesh: str) -> None:
    torch.manual_seed(0)
    who = trained_alone(Products().double(), {"x": torch.randn(8, 8, dtype=torch.float64)})
    program = who.traced.program
    plan = planned(program, world_size, f"tensor={world_size}", f"mesh={mesh}")
    (strategy,) = plan.strategies
    factors = dict(zip((op.target for op in program.layers[0].ops), strategy.assignments, strict=True))
    assert factors[PRODUCT] == ("k",) * len(strategy.mesh)
    priced = layer_collectives(program, program.layers[0], strategy)
    sends = [run for run in priced if run.kind == "send"]
    assert [run.axis.size for run in sends] == [size for size in strategy.mesh for _ in range(size - 1)]
    assert {(run.num_bytes, run.phase, run.purpose) for run in sends} == {(8 * 8 * 8, "forward", "kernel")}
    assert_parity(who, plan)  # of numbers, and of what ran with what was priced


def test_files_of_ops_are_found() -> None:
    assert set(losses.FAMILIES) | set(views.FAMILIES) <= set(own_families())
