"""Price what you emit: the collectives that a training step runs are the ones that the plan's price counts.

Every plan that `tests/parity` trains by is held against this law there.  Here are the law's own tests, and what those
plans don't show.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.lower import ParallelModule
from autopar.lower.communication.collectives import Collective
from autopar.plan import Plan
from autopar.search import SearchRequest
from autopar.step.costs.plan_collectives import plan_collectives
from autopar.verify.rehearsal import loss_of, run_ranks
from tests.collectives import assert_run_equals_priced, of_groups, volume_priced, volume_run
from tests.models import make_plain_gpt
from tests.random_plans import random_plan
from tests.zoo import Subject, plan_for, quick_prices, quick_search, subject, trained_alone


def collectives_run(who: Subject, plan: Plan) -> list[list[Collective]]:
    """What the ranks run in the forward and backward pass of one step, in rank order."""

    def step(model: ParallelModule) -> list[Collective]:
        with model.recording() as collectives:
            loss_of(model(**who.inputs)).backward()
        return collectives

    return run_ranks(who.model, who.traced, plan, step)


def check(who: Subject, plan: Plan) -> None:
    assert_run_equals_priced(who.traced.program, plan, collectives_run(who, plan), steps=1)


@pytest.mark.parametrize("model", ["unet", "contrastive"])
def test_a_step_in_float32_runs_what_was_priced(model: str) -> None:
    check(subject(model, torch.float32), plan_for(model, 2, (), torch.float32))


@pytest.mark.slow
def test_stages_in_float32_run_what_was_priced() -> None:
    constraints = ("pipeline=2", "schedule=zbv", "microbatches=4", "tensor=2")
    plan = plan_for("deep_crossing", 4, constraints, torch.float32, stages=True)
    check(subject("deep_crossing", torch.float32), plan)


def test_the_law_notices_a_message_left_out() -> None:
    """A value that crosses a cut, or a tied gradient, that is not listed is caught."""
    constraints = ("schedule=1f1b", "pipeline=2", "microbatches=2")
    who, plan = subject("gpt2", torch.float32), plan_for("gpt2", 2, constraints, torch.float32, stages=True)
    run = of_groups(collectives_run(who, plan), plan)[0]
    priced = plan_collectives(who.traced.program, plan)
    for purpose in ("stage", "tied", "output"):
        rest = tuple(each for each in priced if each.purpose != purpose)
        assert len(rest) < len(priced), purpose
        assert volume_run(run) != pytest.approx(volume_priced(rest)), purpose


@pytest.mark.slow
def test_what_a_plan_pays_for_collectives_is_the_price_of_that_list() -> None:
    """Layer costs and boundary moves add up to `plan_collectives`, priced one by one."""
    who, prices = subject("llama", torch.float32), quick_prices(4)
    for constraints in ((), ("zero=3", "recompute=full"), ("microbatches=2",)):
        plan = plan_for("llama", 4, constraints, torch.float32)
        listed = [
            (each, each.times * prices.collective_s(each.kind, each.axis, each.num_bytes))
            for each in plan_collectives(who.traced.program, plan)
        ]
        costs = plan.costs
        again = sum(seconds for each, seconds in listed if each.phase == "recompute")
        assert again <= sum(cost.recompute_s for cost in costs) * (1 + 1e-9)
        paid = sum(cost.activation_comm_s + cost.parameter_comm_s for cost in costs)
        assert sum(seconds for _, seconds in listed) - again == pytest.approx(paid, rel=1e-9)


class ScaledRows(nn.Module):
    """Scales every row of the batch by a constant of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = 1 + torch.arange(8, dtype=x.dtype)[:, None].expand(8, 16)
        return nn.functional.mse_loss(self.last(torch.tanh(self.first(x) * scale.sin())), y)


def test_a_constant_with_a_row_per_sample_is_cut_in_time_before_it_is_cut_on_devices() -> None:
    torch.manual_seed(0)
    who = trained_alone(ScaledRows(), {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}, in_double=False)
    request = SearchRequest(constraints=("data=2", "microbatches=2"))
    check(who, quick_search(who.traced.program, 2, request))


def test_the_law_notices_a_price_left_out() -> None:
    """A plan whose program runs one more collective than is listed is caught."""
    who, plan = subject("flat", torch.float32), plan_for("flat", 2, ("data=2", "zero=0"), torch.float32)
    (run,), priced = of_groups(collectives_run(who, plan), plan), plan_collectives(who.traced.program, plan)
    assert volume_run(run) == pytest.approx(volume_priced(priced))
    assert priced, "a data-parallel plan reduces gradients"
    assert volume_run(run) != pytest.approx(volume_priced(priced[1:]))
    assert volume_run(run[1:]) != pytest.approx(volume_priced(priced))


def test_only_the_agreement_on_random_numbers_is_not_priced() -> None:
    """A model with dropout runs one broadcast of a seed besides."""
    torch.manual_seed(0)
    who = trained_alone(*make_plain_gpt(dropout=0.1), in_double=False)
    plan = random_plan(who.traced.program, 4, 3)
    (run,) = of_groups(collectives_run(who, plan), plan)
    seeds = [each for each in run if each.kind == "broadcast"]
    assert len(seeds) == 1
    assert seeds[0].num_bytes == 8
    rest = [each for each in run if each.kind != "broadcast"]
    priced = plan_collectives(who.traced.program, plan)
    assert volume_run(rest) == pytest.approx(volume_priced(priced), rel=1e-12)
