"""Models cut into pipeline stages on real processes, and what their ranks hold, put together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from autopar import Cluster
from autopar.cost import ClusterPrices
from autopar.lower import ParallelModule
from autopar.plan import Plan, Stage
from autopar.planning.call_traces import trace_model
from autopar.schedules import stage_group
from autopar.search import SearchRequest, search
from tests.end_to_end.harness import assert_near, gradients_of, parallelize, run_step


def make_plan(
    model: nn.Module,
    inputs: Any,
    schedule: str = "1f1b",
    num_groups: int = 2,
    num_microbatches: int = 4,
    constraints: Sequence[str] = (),
    cuts: Sequence[int] = (),
) -> Plan:
    """Stages cut at `cuts`, or of about equal numbers of layers, each with what `constraints` allow."""
    program = trace_model(model, inputs).program
    size = dist.get_world_size() // num_groups
    prices = ClusterPrices(Cluster.of("cpu", devices_per_node=size), None)
    request = SearchRequest(math.inf, constraints=(f"microbatches={num_microbatches}", *constraints))
    found = search(program, size, prices, request)
    num_stages = num_groups * (1 if schedule in ("gpipe", "1f1b") else 2)
    layers = len(program.layers)
    bounds = (0, *cuts, layers) if cuts else [round(layers * i / num_stages) for i in range(num_stages + 1)]
    stages = tuple(
        Stage(start, stop, stage_group(schedule, index, num_groups))
        for index, (start, stop) in enumerate(itertools.pairwise(bounds))
    )
    return found.with_decisions(world_size=dist.get_world_size(), stages=stages, schedule=schedule)


def cut(model: nn.Module, inputs: Any, schedule: str = "1f1b", num_groups: int = 2, **kwargs: Any) -> ParallelModule:
    """`model` by the plan that `make_plan` makes."""
    return parallelize(model, inputs, plan=make_plan(model, inputs, schedule, num_groups, **kwargs))


def gathered(value: Any) -> list[Any]:
    """Every rank's `value`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients of all stages by parameter name, on every rank; those of tied parameters equal to the bit."""
    own = gradients_of(model)
    if not isinstance(model, ParallelModule):
        return own
    found: dict[str, Tensor] = {}
    for theirs in gathered(own):
        for name, gradient in theirs.items():
            assert found.setdefault(name, gradient).equal(gradient), f"ranks have different gradients of {name}"
    return {name: found[name] for name in model.full_state_dict() if name in found}


def assert_same_gradients(parallel: nn.Module, single: nn.Module) -> None:
    """Those that both have now."""
    assert_near(all_gradients(parallel), all_gradients(single), 1e-4, floor=1e-2)


def assert_same_step(parallel: nn.Module, single: nn.Module, inputs: Any, tolerance: float = 1e-6) -> None:
    """One forward and backward of both, compared; gradients stay for what comes next."""
    parallel.zero_grad()
    single.zero_grad()
    expected, found = run_step(single, inputs), run_step(parallel, inputs)
    assert len(set(gathered(found))) == 1
    assert abs(found - expected) <= tolerance * abs(expected), (found, expected)
    assert_same_gradients(parallel, single)
