"""Models on the meta device on real processes: one device's values, each rank with its parts only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import MaterializationError
from tests.end_to_end.harness import (
    assert_near,
    assert_same_step,
    launch,
    make,
    parallelize,
    state_of,
)
from tests.end_to_end.pipelines import assert_same_step as assert_same_pipelined_step
from tests.end_to_end.test_bad_input import refused

pytestmark = pytest.mark.slow


def check_values(name: str, constraints: Sequence[str]) -> None:
    """The values of building the model on one device with rank 0's seed; then it trains as that does."""
    config, inputs = make(name)[0].config, make(name)[1]
    kind = type(make(name)[0])
    with torch.device("meta"):
        model = kind(copy.deepcopy(config))
    first, *_ = model.parameters()
    first.requires_grad_(False)
    torch.manual_seed(7)
    single = kind(copy.deepcopy(config))
    next(iter(single.parameters())).requires_grad_(False)
    after = torch.get_rng_state()
    rank = dist.get_rank()
    torch.manual_seed(7 if rank == 0 else 100 + rank)
    before = torch.get_rng_state()
    parallel = parallelize(model, inputs, constraints=constraints)
    assert torch.equal(torch.get_rng_state(), after if rank == 0 else before)
    assert_near(state_of(parallel), state_of(single), 0.0)
    assert [p.requires_grad for p in parallel.parameters()] == [p.requires_grad for p in single.parameters()]
    assert all(x.is_meta for x in model.parameters())
    assert_parts(parallel, constraints)
    assert_same_step(parallel, single, inputs)


def assert_parts(parallel: nn.Module, constraints: Sequence[str]) -> None:
    """No rank keeps memory for more than its parts, and with ZeRO-3 these are half of all."""
    held = total = 0
    for parameter in parallel.parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
        held += local.numel()
        total += parameter.numel()
    assert "zero=3" not in constraints or held < 0.6 * total, (held, total)


def check_values_of_stages(schedule: str) -> None:
    """A rank has its stages' parameters only; a table that is tied across stages is drawn alike on both."""
    single, inputs = make("gpt2")
    torch.manual_seed(7)
    single = type(single)(copy.deepcopy(single.config))
    with torch.device("meta"):
        model = type(single)(copy.deepcopy(single.config))
    torch.manual_seed(7)
    parallel = parallelize(model, inputs, constraints=("pipeline=2", "microbatches=2", f"schedule={schedule}"))
    assert len(parallel.plan.stages) >= 2
    assert_near(state_of(parallel), state_of(single), 0.0)
    held = sum(p.to_local().numel() for p in parallel.parameters() if isinstance(p, DTensor))
    assert held < 0.8 * sum(p.numel() for p in single.parameters())
    assert_same_pipelined_step(parallel, single, inputs)


def check_as_materialized(constraints: Sequence[str]) -> None:
    """With the user's own initialization, and tied parameters."""

    def initialize(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            nn.init.normal_(module.scale)

    with torch.device("meta"):
        model, single = Scaled(), Scaled()
    torch.manual_seed(1)
    autopar.materialize(single, initialize=initialize)
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 64).view(8, 8)
    torch.manual_seed(1)
    parallel = parallelize(model, (x,), initialize=initialize, constraints=constraints)
    assert_near(state_of(parallel), state_of(single), 0.0)
    assert_same_step(parallel, single, {"x": x})


class Scaled(nn.Module):
    """Nobody but the user says what `scale` is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.empty(8))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> a scalar."""
        return (self.second(self.first(self.norm(x)).relu()) * self.scale).square().mean()


def check_refusals() -> None:
    with torch.device("meta"):
        model = Scaled()
    x = torch.zeros(8, 8)
    with refused(MaterializationError, "'scale': on the meta device", "initialize="):
        parallelize(model, (x,))

    def fail_on_last_rank(module: nn.Module) -> None:
        if isinstance(module, Scaled):
            if dist.get_rank() == dist.get_world_size() - 1:
                raise MaterializationError("no room on this rank")
            nn.init.ones_(module.scale)

    with refused(MaterializationError, "no room on this rank"):
        parallelize(model, (x,), initialize=fail_on_last_rank)
    with refused(MaterializationError, r"autopar\.materialize\(model\)"):
        autopar.verify(model, autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), (x,)), (x,))


def test_two_ranks_draw_one_devices_values() -> None:
    launch(
        2,
        partial(check_values, "gpt2", ("data=2", "zero=3")),
        partial(check_values, "llama", ("tensor=2",)),
        partial(check_as_materialized, ("data=2", "zero=3")),
        partial(check_values_of_stages, "1f1b"),
        partial(check_refusals),
    )


def test_four_ranks_draw_one_devices_values() -> None:
    launch(4, partial(check_values, "bert", ("data=2", "tensor=2", "zero=1")))
