"""Rehearsals are small: fewer devices, smaller batches, the same plan."""

import pytest
import torch

import autopar
from autopar.errors import PlanMismatchError
from autopar.shrinking import shrink_inputs, shrink_plan
from tests.models import make_llama, make_vit


@pytest.fixture(scope="module")
def cluster() -> autopar.Cluster:
    return autopar.Cluster.of("h100", nodes=8, devices_per_node=8)


def test_a_plan_for_64_devices_is_rehearsed_on_8(cluster: autopar.Cluster) -> None:
    model, inputs = make_llama(batch=64, length=64)
    plan = autopar.plan(model, cluster, inputs, constraints=["data=8", "tensor=8", "zero=3", "microbatches=4"])
    small = shrink_plan(plan)
    assert (plan.world_size, plan.num_microbatches) == (64, 4)
    assert small.world_size in (4, 8)  # one axis of 2 for each axis of the plan's meshes, refined
    assert small.num_microbatches == 2
    assert [s.assignments for s in small.strategies] == [s.assignments for s in plan.strategies]
    report = autopar.verify(model, plan, inputs)
    assert report.world_size == small.world_size
    assert len(report.gradient_errors) == len(list(model.parameters()))


def test_what_the_model_can_not_take_smaller_stays(cluster: autopar.Cluster) -> None:
    model, inputs = make_vit(batch=64)
    plan = autopar.plan(model, cluster, inputs, constraints=["data=64"])
    assert autopar.verify(model, plan, inputs, steps=1).loss_error < 1e-12


def test_batches_shrink_step_by_step() -> None:
    batches = list(shrink_inputs({"x": torch.zeros(64, 32, 7), "flag": True}, 8))
    assert [tuple(batch["x"].shape) for batch in batches] == [(8, 8, 7), (8, 32, 7), (64, 32, 7)]
    assert all(batch["flag"] is True for batch in batches)


def test_a_plan_of_another_model_is_refused(cluster: autopar.Cluster) -> None:
    model, inputs = make_llama(batch=64)
    plan = autopar.plan(model, cluster, inputs)
    other, others = make_llama(batch=64, layers=3)
    with pytest.raises(PlanMismatchError, match="layers"):
        autopar.verify(other, plan, others)
