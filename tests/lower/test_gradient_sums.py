"""The dtype in which gradients are added up and reduced: numbers, bytes on links and in memory, plan files, errors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from autopar.errors import ConstraintError, PlanFormatError
from autopar.lower import ParallelModule
from autopar.lower.communication.collectives import Collective
from autopar.plan import Plan
from autopar.planning.arguments import training_spec
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest
from autopar.step.costs.plan_collectives import plan_collectives
from autopar.verify.rehearsal import loss_of, run_ranks
from tests.collectives import assert_run_equals_priced, of_groups, volume_priced, volume_run
from tests.models import make_plain_gpt
from tests.zoo import STEPS, plan_for, quick, quick_search, rehearse, subject

SETTINGS = [
    ("data=2", "zero=0"),
    ("data=2", "zero=1", "microbatches=2"),
    ("data=2", "zero=2", "microbatches=2"),
    ("data=2", "zero=3", "recompute=full"),
    ("pipeline=2", "schedule=1f1b", "microbatches=2", "data=2"),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", SETTINGS, ids=str)
def test_gradients_rounded_to_float32_are_near_and_half_as_many_bytes_travel(constraints: Sequence[str]) -> None:
    who, world = subject("llama", torch.float64), 4 if "pipeline=2" in constraints else 2
    plans = [plan_for("llama", world, (*constraints, *more), stages=True) for more in ((), ("gradients=float32",))]
    wide, narrow = (rehearse(who, plan) for plan in plans)
    assert wide.report.worst_gradient[1] <= 1e-9
    assert 1e-9 < narrow.report.worst_gradient[1] < 1e-6, "every sum is rounded once"
    assert narrow.report.loss_error < 1e-6
    for plan, found in zip(plans, (wide, narrow), strict=True):
        assert_run_equals_priced(who.traced.program, plan, found.collectives, STEPS)
    moved = [sum(each.num_bytes for each in found.collectives[0]) for found in (wide, narrow)]
    assert moved[1] < moved[0]
    assert "gradients in float32" in str(plans[1])
    assert Plan.from_json(plans[1].to_json()) == plans[1]


def mixed(*constraints: str) -> tuple[Plan, list[list[Collective]], dict[str, torch.Tensor]]:
    """In bfloat16 with parameters in float32: the plan, what ranks run in a step, and the gradients of the first."""
    torch.manual_seed(0)
    model, inputs = make_plain_gpt()
    traced = trace_model(copy.deepcopy(model), inputs, dtype=torch.bfloat16)
    spec = training_spec(model, "adamw")
    plan = quick_search(traced.program, 2, SearchRequest(training=spec, constraints=quick(constraints)))

    def step(made: ParallelModule) -> tuple[list[Collective], dict[str, torch.Tensor]]:
        gradients: dict[str, torch.Tensor] = {}
        with made.recording() as collectives:
            loss_of(made(**inputs)).backward()
        for name, parameter in made.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            gradients[name] = parameter.grad.to_local()
        return collectives, gradients

    found = run_ranks(model, traced, plan, step)
    ranks = [collectives for collectives, _ in found]
    for run in of_groups(ranks, plan):
        priced = plan_collectives(traced.program, plan, spec)
        assert volume_run(run) == pytest.approx(volume_priced(priced), rel=1e-12)
    return plan, ranks, found[0][1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", [("zero=1",), ("zero=1", "microbatches=2"), ("zero=3",)], ids=str)
def test_layers_in_bfloat16_reduce_in_float32_unless_asked(constraints: Sequence[str]) -> None:
    wide, many, first = mixed("data=2", *constraints)
    narrow, few, second = mixed("data=2", *constraints, "gradients=bf16")
    reduced = [
        sum(each.num_bytes for each in ranks[0] if each.kind == "reduce_scatter" and each.num_bytes > 100)
        for ranks in (many, few)
    ]
    assert reduced[0] == pytest.approx(2 * reduced[1])
    assert narrow.peak_memory_bytes < wide.peak_memory_bytes
    largest = max(g.norm().item() for g in first.values())
    errors = [(second[name] - g).norm().item() / largest for name, g in first.items()]
    assert 0 < max(errors) < 0.01
    assert any("bfloat16" in note and "rounds" in note for note in narrow.notes)
    assert not any("rounds to" in note for note in wide.notes)


def test_what_it_may_be() -> None:
    plan = plan_for("llama", 2, ("data=2",))
    with pytest.raises(ConstraintError, match="'fp16' is none of fp32, bf16"):
        plan_for("llama", 2, ("gradients=fp16",))
    with pytest.raises(ConstraintError, match="holds for the whole plan"):
        plan_for("llama", 2, ("model.layers.*: gradients=bf16",))
    edited = replace(plan, decisions=replace(plan.decisions, gradients="float16"))
    with pytest.raises(PlanFormatError, match="gradients: 'float16' is none of"):
        Plan.from_json(edited.to_json())
    before = "\n".join(line for line in plan.to_json().splitlines() if '"gradients"' not in line)
    assert Plan.from_json(before).decisions == plan.decisions
