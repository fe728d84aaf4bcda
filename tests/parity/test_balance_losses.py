"""Losses that multiply means over the whole batch, in microbatches and stages: exact, or of each microbatch by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ConstraintError, PlanMismatchError, VerificationError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.splitting import splittable
from autopar.search import SearchRequest
from autopar.search.microbatches.late_ops import late_program
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.step.variants.planned_program import as_decided
from autopar.verify.rehearsal import join_runs, loss_of, run_ranks, run_single, train
from tests.models import make_mixtral
from tests.parity.test_experts import NUM_EXPERTS, Scored, make
from tests.parity.test_routers import Biased
from tests.zoo import Subject, assert_parity, quick, quick_search, trained_alone

ALLOWED = "batch_statistic: per_microbatch"


class Ratio(nn.Module):
    """A loss of sums that are no experts': a Dice loss, the root of a mean, and a penalty of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A scalar."""
        p = self.b(self.a(x).tanh()).sigmoid().squeeze(-1)
        dice = 1 - 2 * (p * y).sum() / (p.sum() + y.sum())
        return dice + p.square().mean().sqrt() + 0.1 * self.a.weight.square().sum()


class Penalized(nn.Module):
    """A mean over samples, and what is made of parameters alone, which the whole batch has once."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        penalty = (self.a.weight @ self.b.weight).square().sum() + self.b.weight.abs().mean()
        return self.b(self.a(x).tanh()).square().mean() + 0.1 * penalty


class Moved(Biased):
    """A router whose bias moves once a forward, and a count of all rows that experts ever got."""

    def __init__(self) -> None:
        super().__init__(0.5, "one_hot")
        self.register_buffer("seen", torch.zeros(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        hidden = self.mix(x)
        if self.training:
            ids = (self.router(hidden).sigmoid() + self.bias).topk(2, dim=-1).indices
            self.get_buffer("seen").add_(self.counted(ids).to(hidden.dtype))
        return (hidden + self.routed(hidden)).square().mean()


class Similar(nn.Module):
    """Compares all samples with each other: no sums."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        y = self.a(x)
        return (y @ y.T).logsumexp(-1).mean()


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    if name == "qwen":
        return make("qwen")
    if name == "masked":  # padding counts for neither mean
        model, inputs = make_mixtral(layers=2)
        model.config.output_router_logits = True
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, 5:], mask[3, 2:], mask[6, 1:] = 0, 0, 0
        return model, {**inputs, "attention_mask": mask}
    x = torch.randn(16, 8).double()
    if name == "ratio":
        return Ratio().double(), {"x": x, "y": (torch.rand(16) > 0.5).double()}
    made = {"scored": lambda: Scored(3.0), "moved": Moved, "similar": Similar, "penalized": Penalized}
    return made[name]().double(), {"x": x}


@cache
def subject(name: str) -> Subject:
    model, inputs = made(name)
    return trained_alone(model.double(), inputs)


def planned(who: Subject, world: int, *constraints: str) -> tuple[Subject, Plan]:
    """The plan that is found of what runs in microbatches, and that."""
    request = SearchRequest(constraints=quick(constraints), schedules=schedule_actions)
    program = splittable(who.traced.program, request, world)
    plan = quick_search(program, world, request)
    assert as_decided(who.traced.program, plan.decisions) == program
    return replace(who, traced=replace(who.traced, program=program)), plan


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "world", "constraints"),
    [
        ("scored", 1, ("microbatches=4",)),
        ("scored", 2, ("microbatches=2", "data=2", "zero=3")),
        ("scored", 4, ("microbatches=2", "expert=2", "recompute=full")),
        ("ratio", 1, ()),
        ("ratio", 2, ("microbatches=2", "data=2")),
        ("ratio", 2, ("microbatches=4", "tensor=2", "recompute=selective")),
        ("moved", 2, ("microbatches=2", "expert=2")),
        pytest.param(
            "qwen",
            4,
            ("microbatches=2", "pipeline=2", "stages=4", "schedule=looped_bfs", "expert=2"),
            marks=pytest.mark.slow,
        ),
        pytest.param("masked", 2, ("microbatches=4", "pipeline=2"), marks=pytest.mark.slow),
        pytest.param("masked", 2, ("microbatches=2", "data=2", "logits=16"), marks=pytest.mark.slow),
    ],
)
def test_microbatches_train_what_one_device_trains(name: str, world: int, constraints: tuple[str, ...]):
    who = subject(name)
    assert isinstance(time_assignment(who.traced.program, 2), str)
    who, plan = planned(who, world, *constraints)
    assert who.traced.program.tail
    assert_parity(who, plan, priced=not any("expert" in text for text in constraints))


@pytest.mark.parametrize(
    ("world", "constraints"),
    [
        (1, ("microbatches=4",)),
        (2, ("microbatches=2", "data=2")),
        (2, ("microbatches=2", "tensor=2", "recompute=full")),
    ],
)
def test_penalties_of_parameters_count_once(world: int, constraints: tuple[str, ...]):
    who, plan = planned(subject("penalized"), world, *constraints)
    assert not who.traced.program.tail
    assert_parity(who, plan)


def test_what_compares_samples_has_no_sums():
    program = subject("similar").traced.program
    assert late_program(program, 2) is None
    with pytest.raises(ConstraintError, match="if it compares samples with each other"):
        planned(subject("similar"), 2, "microbatches=2")


class Mean(nn.Module):
    """What a device trains that gives each microbatch its own loss, and takes their mean."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model, self.count = model, count

    def forward(self, **inputs: Tensor) -> Tensor:
        """A scalar."""
        parts = zip(*(x.chunk(self.count) for x in inputs.values()), strict=True)
        losses = [loss_of(self.model(**dict(zip(inputs, part, strict=True)))) for part in parts]
        return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("name", "world", "constraints"),
    [
        ("scored", 2, ("microbatches=4", "data=2")),
        pytest.param("qwen", 2, ("microbatches=4", "pipeline=2", "schedule=1f1b"), marks=pytest.mark.slow),
        pytest.param("qwen", 4, ("microbatches=4", "pipeline=2", "schedule=interleaved_1f1b"), marks=pytest.mark.slow),
    ],
)
def test_statistics_of_each_microbatch_are_taken_where_they_are_allowed(
    name: str, world: int, constraints: tuple[str, ...]
):
    model, inputs = made(name)
    if name == "qwen":  # as many targets in each microbatch
        inputs["labels"] = inputs["input_ids"]
    who = trained_alone(model.double(), inputs)
    who, plan = planned(who, world, *constraints, ALLOWED)
    assert any("batch_statistic" in note and "statistics of each of 4 microbatches" in note for note in plan.notes)
    alone = run_single(Mean(model, 4), inputs, 1, in_double=True)
    found = join_runs(run_ranks(model, who.traced, plan, lambda own: train(own, inputs, 1)), plan.num_groups)
    assert found.losses[0] == pytest.approx(alone.losses[0], rel=1e-12)
    for key, gradient in found.gradients.items():
        assert torch.allclose(gradient, alone.gradients[f"model.{key}"], rtol=1e-9, atol=1e-12)


def planned_by_api(model: nn.Module, inputs: Mapping[str, Any], *constraints: str) -> Plan:
    return autopar.plan(model, autopar.Cluster.of("cpu", devices_per_node=2), dict(inputs), constraints=constraints)


def test_the_plan_says_so_and_is_checked():
    model, inputs = made("ratio")
    plan = planned_by_api(model, inputs, "microbatches=2")
    assert any("all forwards come before the first backward" in note for note in plan.notes)
    assert plan.decisions.late_ops
    assert Plan.from_json(plan.to_json()).decisions == plan.decisions
    assert autopar.verify(model, plan, inputs).loss_error <= 1e-12
    edited = plan.with_decisions(late_ops=plan.decisions.late_ops[:-1])
    with pytest.raises(PlanMismatchError, match=r"can't run behind all layers: .* reads what they make"):
        autopar.verify(model, edited, inputs)
    with pytest.raises(ConstraintError, match=r"schedule=1f1b begins backward passes before .*schedule=gpipe"):
        planned_by_api(model, inputs, "schedule=1f1b", "pipeline=2")


def test_statistics_of_microbatches_are_named_and_not_verified():
    model, inputs = made("scored")
    with pytest.raises(ConstraintError, match=f"schedule=gpipe, or allow .*'{ALLOWED}'"):
        planned_by_api(model, inputs, "schedule=1f1b", "microbatches=4", "pipeline=2")
    plan = planned_by_api(model, inputs, "microbatches=2", ALLOWED)
    assert plan.decisions.statistics
    with pytest.raises(VerificationError, match=r"isn't exact: .* lets autopar\.batch_statistic use"):
        autopar.verify(model, plan, inputs)


def test_programs_that_are_exact_in_microbatches_stay_as_they_are():
    program = subject("ratio").traced.program
    late = late_program(program, 2)
    assert late is not None
    assert isinstance(time_assignment(late, 2), TimeAssignment)
    assert splittable(late, SearchRequest(), 2) is late
