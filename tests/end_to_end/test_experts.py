"""On real processes experts that devices share train as on one device, with rows that are sent over gloo."""

from __future__ import annotations

import copy
import shutil
from functools import partial

import pytest
import torch

from autopar.placement import Axis
from autopar.planning.call_traces import trace_model
from autopar.verify.rehearsal import loss_of
from tests.end_to_end import pipelines
from tests.end_to_end.harness import assert_same_step, launch, parallelize
from tests.models import make_mixtral
from tests.parity.test_dispatch import Shared, on_nodes, pauses_of
from tests.parity.test_experts import routing
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def check_experts(constraints: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    model, inputs = make_mixtral(layers=1, products="grouped_mm")
    single = copy.deepcopy(model)
    parallel = parallelize(model, inputs, constraints=constraints)
    assert_same_step(parallel, single, inputs)
    report = parallel.report(lambda: loss_of(parallel(**inputs)).backward(), steps=1)
    return dict(report.expert_rows)


@pytest.mark.parametrize(
    ("world_size", "constraints"),
    [
        (2, ("expert=2",)),
        (4, ("tensor=2", "expert=2", "zero=3")),
    ],
)
def test_experts_over_gloo(world_size: int, constraints: tuple[str, ...]) -> None:
    first, *others = run_ranks(check_experts, world_size, constraints)
    assert all(rows == first for rows in others)
    assert first
    assert all(sum(rows) > 0 for rows in first.values())


def check_nodes() -> int:
    model, inputs = make_mixtral(layers=1, products="grouped_mm")
    plan = on_nodes(trace_model(model, inputs).program, 2, 2)
    parallel = parallelize(model, inputs, plan=plan)
    with parallel.recording() as collectives:
        assert_same_step(parallel, copy.deepcopy(model), inputs)
    return sum(each.kind == "all_to_all" and each.axis == Axis(2, 2) for each in collectives)


def test_tokens_are_sent_to_nodes_over_gloo() -> None:
    assert all(run_ranks(check_nodes, 4))


def check_balance_loss(constraints: tuple[str, ...]) -> bool:
    model, inputs = make_mixtral(layers=2, products="grouped_mm")
    model.config.output_router_logits = True
    single = copy.deepcopy(model)
    parallel = parallelize(model, inputs, constraints=constraints)
    pipelines.assert_same_step(parallel, single, inputs)
    return bool(parallel.plan.decisions.late_ops)


def test_a_balance_loss_of_the_whole_batch_in_stages_over_gloo() -> None:
    assert all(run_ranks(check_balance_loss, 4, ("pipeline=2", "expert=2", "microbatches=2")))


def check_shared(*, compiled: bool) -> None:
    torch.manual_seed(0)
    ids = routing("skewed").repeat(64, 1)
    inputs = {"x": torch.randn(len(ids), 8), "ids": ids, "weights": torch.rand(ids.shape)}
    model = Shared(in_front=False)
    single = copy.deepcopy(model)
    program = trace_model(single, inputs).program
    plan = on_nodes(program, 1, 2)
    parallel = parallelize(model, inputs, plan=plan.with_decisions(compiled=compiled))
    assert pauses_of(program, parallel.plan)
    assert_same_step(parallel, single, inputs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
def test_shared_experts_compute_while_tokens_travel_over_gloo() -> None:
    launch(2, partial(check_shared, compiled=False), partial(check_shared, compiled=True))
