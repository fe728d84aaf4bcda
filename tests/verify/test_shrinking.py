"""Rehearsals are small: fewer devices, smaller batches, the same plan."""

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ConstraintError, PlanMismatchError, VerificationError
from autopar.plan import stages_problem
from autopar.step.plan_check import check_fit
from autopar.trace import trace
from autopar.verify.shrink_plan import shrink_inputs, shrink_plan
from tests.models import make_gpt2, make_llama, make_vit
from tests.random_plans import random_pipeline, random_plan, with_stages


@pytest.fixture(scope="module")
def cluster() -> autopar.Cluster:
    return autopar.Cluster.of("h100", nodes=8, devices_per_node=8)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 8), ("zbv", 8)])
def test_a_pipeline_of_many_groups_is_rehearsed_on_few(schedule: str, stages: int) -> None:
    model, inputs = make_gpt2(batch=32, layers=6, length=8)
    program = trace(model, (), inputs).program
    groups = stages if schedule == "1f1b" else stages // 2
    plan = with_stages(random_plan(program, 4, 1, 8), groups, schedule, stages, random.Random(0))
    small = shrink_plan(plan)
    assert (plan.world_size, small.world_size, small.num_groups) == (4 * groups, 8, 8 // small.group_size)
    assert small.num_groups >= 2
    assert len(small.stages) // small.num_groups == len(plan.stages) // groups
    assert {stage.start for stage in small.stages} < {stage.start for stage in plan.stages}
    assert small.num_microbatches in (2, 4)
    assert not stages_problem(small.decisions)
    assert autopar.verify(model, plan, inputs, steps=1).world_size == 8


def test_stages_that_do_not_fit_are_refused() -> None:
    model, inputs = make_gpt2(batch=8, layers=2, length=8)
    program = trace(model, (), inputs).program
    plan = random_pipeline(program, 4, 0, 2, "gpipe", 2)
    first, second = plan.stages
    for change, problem in (
        ({"stages": (first, replace(second, stop=9))}, "stages end at layer 8 of 4"),
        ({"stages": (first, replace(second, start=first.stop + 1))}, f"must start at layer {first.stop}"),
        ({"stages": (replace(first, group=1), replace(second, group=0))}, "runs it on group 0"),
        ({"schedule": "zbv"}, "zbv needs 2 stages per device group"),
        ({"schedule": "1f1b", "num_microbatches": 1}, "at least as many microbatches as stages"),
        ({"stages": ()}, "schedule 'gpipe' without stages"),
        ({"strategies": tuple(replace(s, time=()) for s in plan.strategies)}, "0 factors in time"),
        ({"num_microbatches": 16}, "can't be cut into 16"),
    ):
        with pytest.raises(PlanMismatchError, match=problem):
            check_fit(plan.with_decisions(**change), program, 4)


@pytest.mark.slow
def test_what_the_model_can_not_take_smaller_stays(cluster: autopar.Cluster) -> None:
    model, inputs = make_vit(batch=64)
    plan = autopar.plan(model, cluster, inputs, constraints=["data=64"])
    assert autopar.verify(model, plan, inputs, steps=1).loss_error < 1e-12


def test_batches_shrink_step_by_step() -> None:
    batches = list(shrink_inputs({"x": torch.zeros(64, 32, 7), "flag": True}, 8))
    assert [tuple(batch["x"].shape) for batch in batches] == [(8, 8, 7), (8, 32, 7)]
    assert all(batch["flag"] is True for batch in batches)


@pytest.mark.slow
def test_a_plan_of_another_model_is_refused(cluster: autopar.Cluster) -> None:
    model, inputs = make_llama(batch=64)
    plan = autopar.plan(model, cluster, inputs, constraints=["data=64"])
    other, others = make_llama(batch=64, layers=3)
    with pytest.raises(PlanMismatchError, match="layers"):
        autopar.verify(other, plan, others)


class Picks(nn.Module):
    """Takes entries of a sequence by their places: some that the batch says, some that the code does."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.length = length

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """[batch, length, 7] and [batch] -> a loss."""
        picked = self.linear(x)[torch.arange(len(x)), places]
        weights = torch.arange(x.shape[1])[torch.tensor([0, self.length - 1])]
        return (picked * weights.sum()).square().mean()


@pytest.mark.parametrize("length", [16, 2])
def test_a_dim_that_is_indexed_is_not_cut(length: int) -> None:
    """What indexes it are constants (first seen while tracing, for 16), or the batch's own entries."""
    inputs = {"x": torch.randn(16, 16, 7), "places": torch.arange(16).flip(0)}
    model = Picks(length)
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=["data=2"])
    assert autopar.verify(model, plan, inputs).loss_error < 1e-12


def test_a_model_that_does_not_run_is_an_error() -> None:
    inputs = {"x": torch.randn(16, 16, 7), "places": torch.arange(16).flip(0)}
    model = Picks(2)
    plan = autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), inputs, constraints=["data=2"])
    with pytest.raises(VerificationError, match=r"doesn't run on one device.*out of (bounds|range)"):
        autopar.verify(model, plan, {**inputs, "places": torch.arange(16) + 1})


class Classifier(nn.Module):
    """Of a few modules, none of which repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.hidden, self.head = nn.Linear(128, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().flatten(1)
        return nn.functional.cross_entropy(self.head(self.hidden(x).relu()), labels)


@pytest.mark.slow
def test_a_model_of_few_modules_has_stages_if_they_are_asked_for() -> None:
    torch.manual_seed(0)
    model, inputs = Classifier(), (torch.randn(8, 1, 4, 4), torch.arange(8) % 4)
    cluster = autopar.Cluster.of("cpu", devices_per_node=2)
    assert len(autopar.plan(model, cluster, inputs).decisions.layers) == 1
    plan = autopar.plan(model, cluster, inputs, constraints="pipeline=2")
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 1), (1, 2)]
    autopar.verify(model, plan, inputs)
    with pytest.raises(ConstraintError, match="stages of 4 layers"):
        autopar.plan(model, cluster, inputs, constraints=["pipeline=2", "stages=6"])


class _Downsampled(nn.Module):
    """A ResNet's stem and stages in small: every stage halves its input and normalizes it by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(*(self._stage(3 if i == 0 else 16) for i in range(4)))
        self.head = nn.Linear(16, 8)

    @staticmethod
    def _stage(channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.stages(images).mean((2, 3))), labels)


@pytest.mark.slow
def test_shrunken_batches_leave_enough_values_to_batch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, labels = _Downsampled(), torch.randint(8, (8,))
    inputs = {"images": torch.randn(8, 3, 24, 24), "labels": labels}
    cluster = autopar.Cluster.of("h100", devices_per_node=2)
    plan = autopar.plan(model, cluster, inputs, constraints=["data=2"])
    shapes: list[tuple[int, ...]] = []
    package = importlib.import_module("autopar.verify")
    run_single = package.run_single

    def record(model: nn.Module, batch: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(batch["images"].shape))
        return run_single(model, batch, *args, **kwargs)

    monkeypatch.setattr(package, "run_single", record)
    report = autopar.verify(model, plan, inputs)
    assert shapes[0] == (8, 3, 24, 24)  # of 2 images the last batch norm would normalize 8 values, of 8 images 32
    assert report.loss_error < 1e-14
