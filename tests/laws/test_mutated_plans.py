"""A plan that loads is legal or refused: changed plans give one device's numbers, or an error that says why not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.errors import PlanFormatError, PlanMismatchError
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Placement, shard
from autopar.plan import Plan
from autopar.program import Program
from autopar.step.plan_check import check_fit
from tests.mutated_plans import mutated
from tests.random_plans import random_pipeline, random_plan
from tests.zoo import assert_parity, subject


def changed(program: Program, seed: int) -> Plan | None:
    """A changed plan that is legal all the same; None if it is refused."""
    if seed % 3:
        base = random_plan(program, 4, seed % 10, 1 + seed % 2)
    else:
        base = random_pipeline(program, 4, seed % 10, 2, "gpipe", 2)
    try:
        plan = Plan.from_json(mutated(base, program, seed)[1])
        check_fit(plan, program, 4)
    except (PlanFormatError, PlanMismatchError):
        return None
    return plan


@pytest.mark.parametrize(
    "seeds", [range(100), *(pytest.param(range(n, n + 100), marks=pytest.mark.slow) for n in (100, 200))], ids=str
)
def test_every_changed_plan_is_legal_or_refused(seeds: range) -> None:
    program = subject("flat").traced.program
    legal = [plan for seed in seeds if (plan := changed(program, seed)) is not None]
    assert 0 < len(legal) < len(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["flat", "gpt2"])
def test_a_changed_plan_that_is_legal_trains_as_one_device_does(model: str) -> None:
    who = subject(model)
    legal = [plan for seed in range(60) if (plan := changed(who.traced.program, seed)) is not None]
    assert len(legal) >= 5
    for plan in legal[:8]:
        assert_parity(who, plan)


def refused(plan: Plan, text: str) -> None:
    with pytest.raises((PlanFormatError, PlanMismatchError), match=text):
        check_fit(plan, subject("flat").traced.program, 4)


def test_what_ran_with_wrong_numbers_is_refused() -> None:
    program = subject("flat").traced.program
    plan = random_plan(program, 4, 1)
    first = plan.strategies[0]

    def with_strategy(**change: object) -> Plan:
        return plan.with_decisions(strategies=(replace(first, **change), *plan.strategies[1:]))  # type: ignore[arg-type]

    check_fit(plan, program, 4)
    refused(with_strategy(zero=7), r"zero is 7, but must be one of \[0, 1, 2, 3\]")
    refused(with_strategy(recompute="garbage"), "recompute is 'garbage', but must be one of")
    refused(plan.with_decisions(num_microbatches=0), "num_microbatches: 0 is not a number")
    refused(with_strategy(mesh=(-2, -2)), r"mesh \(-2, -2\): -2 is not a number of devices")
    sums = tuple(tuple(PARTIAL for _ in layout) for layout in first.storage)
    refused(with_strategy(storage=sums), "stored whole")
    shapes = [program.type_of(name).shape for name in program.layers[0].state]
    can_part = [shape[:1] and shape[0] % (2 * math.prod(first.mesh)) == 0 for shape in shapes]
    assert any(can_part)
    parted = tuple(
        tuple(shard(0, 2) for _ in layout) if can else layout
        for layout, can in zip(first.storage, can_part, strict=True)
    )
    refused(with_strategy(storage=parted), "know contiguous slices only")


def with_loss_in(program: Program, placement: Placement, count: int) -> Plan:
    """A legal plan with that many microbatches, but for the layout in which the loss leaves its layer."""
    plan = random_plan(program, 4, 1, count)
    (layer,) = [layer for layer in program.layers if program.loss in layer.outputs]
    number = plan.layers[program.layers.index(layer)].strategy
    at, last = layer.outputs.index(program.loss), plan.strategies[number]
    outputs = (*last.outputs[:at], tuple(placement for _ in last.outputs[at]), *last.outputs[at + 1 :])
    strategies = [*plan.strategies[:number], replace(last, outputs=outputs), *plan.strategies[number + 1 :]]
    return plan.with_decisions(strategies=tuple(strategies))


@pytest.mark.parametrize("count", [1, 2])
def test_microbatches_begin_backward_with_a_whole_gradient_of_the_loss(count: int) -> None:
    who = subject("flat")
    changed = with_loss_in(who.traced.program, BROADCAST, count)
    if count == 1:
        assert_parity(who, changed)  # backward is the caller's
    else:
        refused(changed, "the loss .* whose gradient is a sum of terms")


@pytest.mark.parametrize("count", [1, 2])
def test_terms_of_the_loss_add_up_once(count: int) -> None:
    who = subject("flat")
    assert_parity(who, with_loss_in(who.traced.program, PARTIAL, count), priced=False)


def test_microbatches_must_give_terms_of_the_loss() -> None:
    program = subject("flat").traced.program
    plan = random_plan(program, 4, 1, 2)
    whole = tuple(replace(s, time=("-",) * len(s.time)) for s in plan.strategies)
    refused(plan.with_decisions(strategies=whole), "microbatches would give the whole gradient|must give a term of it")


def test_a_buffer_is_stored_whole() -> None:
    program = subject("unet").traced.program
    plan = random_plan(program, 4, 0)
    number, position = next(
        (planned.strategy, position)
        for layer, planned in zip(program.layers, plan.layers, strict=True)
        for position, name in enumerate(layer.state)
        if program.values[name].role == "buffer"
    )
    strategy = plan.strategies[number]
    layout = tuple(PARTIAL if axis == 0 else REPLICATE for axis in range(len(strategy.mesh)))
    storage = (*strategy.storage[:position], layout, *strategy.storage[position + 1 :])
    strategies = [*plan.strategies]
    strategies[number] = replace(strategy, storage=storage)
    with pytest.raises(PlanMismatchError, match="whole on every device"):
        check_fit(plan.with_decisions(strategies=tuple(strategies)), program, 4)
