"""The front of what to keep and what to compute again: exact, priced and run as it says, legal or refused."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanMismatchError
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.step.activation_policies import activation_policy, can_rerun, rerun_ops, rerun_policy_name
from autopar.step.costs.layer_cost import running_costs
from autopar.step.costs.rerun_front import rerun_front
from autopar.step.layer.local_layer import place
from autopar.step.layer.planned_layers import own_strategy
from autopar.step.layer_tensors.liveness import running_memory
from autopar.step.plan_check import check_fit
from autopar.step.training import TrainingSpec
from autopar.trace import trace
from tests.lower.test_activation_policies import INPUTS, MODEL
from tests.random_plans import random_plan
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices
from tests.zoo import quick_prices, rehearse, subject

PRICES = TablePrices()


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(MODEL, (), INPUTS).program


def by_kind(plan: Plan) -> Plan:
    """The plan with a strategy for each kind of layer."""
    of = {layer.kind: plan.strategies[layer.strategy] for layer in plan.layers}
    layers = tuple(replace(layer, strategy=layer.kind) for layer in plan.layers)
    return plan.with_decisions(layers=layers, strategies=tuple(of[kind] for kind in range(len(of))))


def whole(program: Program) -> Plan:
    """A plan that shards nothing."""
    return by_kind(search(program, 1, PRICES, SearchRequest(constraints=("recompute=none",))))


def test_no_choice_of_ops_is_below_the_front(program: Program) -> None:
    for layer, strategy in zip(program.kinds, whole(program).strategies, strict=True):
        placed = place(program, layer, strategy)
        front = rerun_front(program, layer, PRICES, TrainingSpec())
        able = [op.name for op in layer.ops if can_rerun(op)]
        if len(able) > 12:
            able = able[:12]
        subsets = [each for count in range(len(able) + 1) for each in itertools.combinations(able, count)]
        names = [rerun_policy_name(each) for each in subsets]
        costs = running_costs(placed, names, PRICES, TrainingSpec())
        for one, other in itertools.pairwise(front):
            price = (other.rerun_s - one.rerun_s) / (one.kept_bytes - other.kept_bytes)
            extra = next(iter(costs.values())).saved_bytes - front[0].kept_bytes
            least = min(cost.recompute_s + price * (cost.saved_bytes - extra) for cost in costs.values())
            assert one.rerun_s + price * one.kept_bytes <= least * (1 + 1e-9)


@pytest.mark.parametrize("training", [TrainingSpec(), TrainingSpec(compiled=True)], ids=["eager", "compiled"])
def test_a_front_has_the_prices_and_bytes_of_its_points(training: TrainingSpec) -> None:
    program = decoder_model(2, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
    layer = program.kinds[1]
    placed = place(program, layer, whole(program).strategies[1])
    front = rerun_front(program, layer, PRICES, training)
    assert len(front) > 4
    policies = [choice.policy for choice in front]
    memory = running_memory(placed, policies, training)
    costs = running_costs(placed, policies, PRICES, training)
    for choice in front:
        assert sum(memory[choice.policy].saved.values()) == choice.kept_bytes
        assert costs[choice.policy].recompute_s == pytest.approx(choice.rerun_s)
    bytes_kept = [choice.kept_bytes for choice in front]
    assert bytes_kept == sorted(bytes_kept, reverse=True)
    slopes = [(a.kept_bytes - b.kept_bytes) / (b.rerun_s - a.rerun_s) for a, b in itertools.pairwise(front)]
    assert slopes == sorted(slopes, reverse=True), "a convex hull"


def test_a_front_is_not_above_what_cheap_ops_give() -> None:
    """Of eager layers: a compiler reruns cheap ops by itself."""
    program = decoder_model(2, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
    layer = program.kinds[1]
    placed = place(program, layer, whole(program).strategies[1])
    selective = running_memory(placed, ["selective"], TrainingSpec())["selective"]
    again = running_costs(placed, ["selective"], PRICES, TrainingSpec())["selective"].recompute_s
    front = rerun_front(program, layer, PRICES, TrainingSpec())
    as_fast = [choice.kept_bytes for choice in front if choice.rerun_s <= again]
    assert min(as_fast) <= sum(selective.saved.values())


@pytest.mark.slow
def test_points_of_a_front_train_as_one_device(program: Program) -> None:
    for world, constraint in ((1, ()), (2, ("data=2",))):
        request = SearchRequest(constraints=("recompute=none", *constraint))
        plan = by_kind(search(program, world, quick_prices(world), request))
        for number in (0.3, 0.6, 1.0):
            strategies = list(plan.strategies)
            for layer in program.kinds:
                front = rerun_front(program, layer, PRICES, TrainingSpec())
                if front:
                    choice = front[round(number * (len(front) - 1))]
                    strategies[layer.kind] = replace(strategies[layer.kind], recompute=choice.policy)
            changed = plan.with_decisions(strategies=tuple(strategies))
            assert "against one device" in str(autopar.verify(MODEL, changed, INPUTS, shrink=False))
            assert Plan.from_json(changed.to_json()) == changed


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_any_ops_may_run_again(name: str) -> None:
    who = subject(name, torch.float64)
    program = who.traced.program
    plan = random_plan(program, 2, 3)
    rng = random.Random(0)
    strategies = tuple(
        replace(s, recompute=rerun_policy_name(op.name for op in kind.ops if can_rerun(op) and rng.random() < 0.6))
        for s, kind in zip(plan.strategies, program.kinds, strict=True)
    )
    plan = plan.with_decisions(
        strategies=tuple(s if rerun_ops(s.recompute) else replace(s, recompute="none") for s in strategies)
    )
    assert any(rerun_ops(s.recompute) for s in plan.strategies)
    assert rehearse(who, plan).report.worst_gradient[1] <= 1e-9


def test_a_search_takes_points_between_named_ways_where_memory_is_short() -> None:
    program = decoder_model(6, 16, 64, 64, hidden=64, ffn=256, heads=4, kv_heads=4)

    def searched(limit: float | None, *constraints: str) -> Plan:
        request = SearchRequest(limit, constraints=("data=2", "zero=0", "microbatches=1", *constraints))
        return search(program, 2, PRICES, request)

    none, full = searched(None, "recompute=none"), searched(None, "recompute=full")
    limit = 0.5 * none.peak_memory_bytes + 0.5 * full.peak_memory_bytes
    plan = searched(limit)
    assert plan.peak_memory_bytes <= limit
    assert any(rerun_ops(strategy.recompute) for strategy in plan.strategies)
    assert none.step_time_s < plan.step_time_s < full.step_time_s
    asked = searched(None, "recompute=ops")
    assert any(rerun_ops(strategy.recompute) for strategy in asked.strategies)
    assert " ops" in str(asked)


def test_ops_that_can_not_run_again_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    program = trace(model, (torch.randn(4, 8),), {}).program
    plan = whole(program)
    dropped = next(op.name for op in program.kinds[0].ops if op.is_random)
    for name, told in (("rerun:nothing_such", "is no op of layer"), (f"rerun:{dropped}", "draws random numbers")):
        changed = plan.with_decisions(strategies=(replace(plan.strategies[0], recompute=name), *plan.strategies[1:]))
        with pytest.raises(PlanMismatchError, match=told):
            check_fit(changed, program, 1)
    changed = plan.with_decisions(strategies=(replace(plan.strategies[0], recompute="rerun:"), *plan.strategies[1:]))
    with pytest.raises(PlanMismatchError, match="recompute is 'rerun:', but must be one of"):
        check_fit(changed, program, 1)
    assert activation_policy(rerun_policy_name(["a"], offloads=True)).offloads


def test_ops_are_named_as_in_the_layer_at_hand() -> None:
    program = decoder_model(3, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
    first, other = program.kinds[1], program.layers[2]
    assert first.kind == other.kind
    assert first is not other
    named = replace(whole(program).strategies[1], recompute=rerun_policy_name(op.name for op in first.ops[3:6]))
    own = own_strategy(program, other, named)
    assert rerun_ops(own.recompute) == tuple(op.name for op in other.ops[3:6])
    costs = [
        running_costs(place(program, layer, each), [each.recompute], PRICES, TrainingSpec())[each.recompute]
        for layer, each in ((first, named), (other, own))
    ]
    assert costs[0] == costs[1]
    assert costs[0].recompute_s > 0
