"""Price what you emit: the collectives that a training step runs are the ones that the plan's price counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from autopar.errors import ConstraintError
from autopar.lower import ParallelModule
from autopar.lower.communicator import Collective
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.rehearsal import loss_of, run_ranks
from autopar.search.layer_cost import PricedCollective
from autopar.search.plan_collectives import plan_collectives
from tests.models import ZOO, make_plain_gpt
from tests.random_plans import random_plan
from tests.zoo import Subject, plan_for, quick_prices, subject, trained_alone

Volume = dict[tuple[str, Axis], float]
Constraints = tuple[str, ...]


def collectives_run(who: Subject, plan: Plan) -> list[Collective]:
    """What rank 0 runs in the forward and backward pass of one step."""

    def step(model: ParallelModule) -> list[Collective]:
        with model.recording() as collectives:
            loss_of(model(**who.inputs)).backward()
        return collectives

    ranks = run_ranks(who.model, who.traced, plan, who.inputs, step)
    assert all(run == ranks[0] for run in ranks), "ranks run different collectives"
    return ranks[0]


def assert_run_equals_priced(who: Subject, plan: Plan) -> None:
    """Equal bytes on every axis by every kind; calls may be fewer, as parameters travel together.

    Whatever is no parameter runs exactly as it is priced, call by call.
    """
    run, priced = collectives_run(who, plan), plan_collectives(who.traced.program, plan)
    assert volume_run(run) == pytest.approx(volume_priced(priced), rel=1e-12)
    calls = Counter((each.kind, each.axis, each.num_bytes) for each in run)
    alone: Counter[tuple[str, Axis, float]] = Counter()
    for each in priced:
        if each.purpose != "parameter" or each.phase == "recompute":
            alone[each.kind, each.axis, each.num_bytes] += each.times
    assert not alone - calls, f"priced, but not run as such: {alone - calls}"
    assert len(run) <= sum(each.times for each in priced)


def volume_run(collectives: list[Collective]) -> Volume:
    volume: Volume = {}
    for each in collectives:
        volume[each.kind, each.axis] = volume.get((each.kind, each.axis), 0.0) + each.num_bytes
    return volume


def volume_priced(collectives: tuple[PricedCollective, ...]) -> Volume:
    volume: Volume = {}
    for each in collectives:
        key = each.kind, each.axis
        volume[key] = volume.get(key, 0.0) + each.times * each.num_bytes
    return volume


def forced(world: int) -> Iterator[Constraints]:
    yield from (("zero=3", "recompute=selective"), (f"tensor={world}", "recompute=full"), (f"sequence={world}",))
    yield ("microbatches=2", "zero=3", "recompute=full")
    if world == 4:
        yield from ((f"data={world}", f"zero={zero}") for zero in (0, 1, 2, 3))
        yield from (("data=2", "tensor=2"), ("microbatches=2", "zero=1"), ("microbatches=2", "zero=2"))
        yield ("microbatches=4", "zero=0", "recompute=selective")


CASES = [
    pytest.param(
        model, world, constraints, id=f"{model}-{world}-{'+'.join(constraints) or 'searched'}",
        marks=() if (world, constraints) == (2, ()) and model in ("llama", "unet", "contrastive") else pytest.mark.slow,
    )
    for model in ZOO
    for world in (2, 4, 8)
    for constraints in ((), *forced(world))
]  # fmt: skip
NO_MICROBATCHES = ("unet", "contrastive")


@pytest.mark.parametrize(("model", "world", "constraints"), CASES)
def test_a_step_runs_what_was_priced(model: str, world: int, constraints: Constraints) -> None:
    if model in NO_MICROBATCHES and any(text.startswith("microbatches") for text in constraints):
        with pytest.raises(ConstraintError, match="needs the whole batch"):
            plan_for(model, world, constraints, torch.float32)
        return
    assert_run_equals_priced(subject(model, torch.float32), plan_for(model, world, constraints, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ZOO)
def test_even_a_random_plan_runs_what_it_would_be_priced(model: str, seed: int) -> None:
    """With one microbatch; with more, random plans cut integers where no search would, and gather them for that."""
    who = subject(model, torch.float32)
    assert_run_equals_priced(who, random_plan(who.traced.program, (2, 4, 8)[seed], seed))


def test_what_a_plan_pays_for_collectives_is_the_price_of_that_list() -> None:
    """Layer costs and boundary moves add up to `plan_collectives`, priced one by one."""
    who, prices = subject("llama", torch.float32), quick_prices(4)
    for constraints in ((), ("zero=3", "recompute=full"), ("microbatches=2",)):
        plan = plan_for("llama", 4, constraints, torch.float32)
        listed = [
            (each, each.times * prices.collective_s(each.kind, each.axis, each.num_bytes))
            for each in plan_collectives(who.traced.program, plan)
        ]
        costs = [plan.costs[layer.strategy] for layer in plan.layers]
        again = sum(seconds for each, seconds in listed if each.phase == "recompute")
        assert again <= sum(cost.recompute_s for cost in costs) * (1 + 1e-9)
        paid = sum(cost.activation_comm_s + cost.parameter_comm_s for cost in costs)
        assert sum(seconds for _, seconds in listed) - again == pytest.approx(paid, rel=1e-9)


def test_the_law_notices_a_price_left_out() -> None:
    """A plan whose program runs one more collective than is listed is caught."""
    who, plan = subject("flat", torch.float32), plan_for("flat", 2, ("data=2", "zero=0"), torch.float32)
    run, priced = collectives_run(who, plan), plan_collectives(who.traced.program, plan)
    assert volume_run(run) == pytest.approx(volume_priced(priced))
    assert priced, "a data-parallel plan reduces gradients"
    assert volume_run(run) != pytest.approx(volume_priced(priced[1:]))
    assert volume_run(run[1:]) != pytest.approx(volume_priced(priced))


def test_only_the_agreement_on_random_numbers_is_not_priced() -> None:
    """A model with dropout runs one broadcast of a seed besides."""
    torch.manual_seed(0)
    who = trained_alone(*make_plain_gpt(dropout=0.1), in_double=False)
    plan = random_plan(who.traced.program, 4, 3)
    run = collectives_run(who, plan)
    seeds = [each for each in run if each.kind == "broadcast"]
    assert len(seeds) == 1
    assert seeds[0].num_bytes == 8
    rest = [each for each in run if each.kind != "broadcast"]
    priced = plan_collectives(who.traced.program, plan)
    assert volume_run(rest) == pytest.approx(volume_priced(priced), rel=1e-12)
