"""What a search minimizes is what its plan reports, and more memory is never slower, on models as they are traced."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError
from autopar.placement import local_shape
from autopar.plan import LayerStrategy, Plan
from autopar.program import Layer, Program
from autopar.search import SearchRequest, TrainingSpec, search
from autopar.step.activation_policies import rerun_ops, rerun_policy_name
from autopar.step.costs.optimizer_costs import optimizer_rate
from autopar.step.layer.boundary_values import boundary_values, transfer_parts_s
from tests.layer_costs import layer_cost
from tests.zoo import plan_for, quick_prices, subject

CONSTRAINTS = ((), ("zero=3", "recompute=selective"), ("data=2", "tensor=2"))


def sum_of_seconds(program: Program, plan: Plan) -> float:
    """The price of a plan, from the plan's own decisions alone, nothing being hidden."""
    prices, training = quick_prices(plan.world_size), TrainingSpec()
    strategies = [plan.strategies[layer.strategy] for layer in plan.layers]
    values = {name: value for value, name in program.parameters.items()}
    shared = {values[name]: (plan.shared_mesh, layout) for name, layout in plan.shared_storage}
    seconds = 0.0
    for layer, strategy in zip(program.layers, strategies, strict=True):
        own = named_as(strategy, program.kinds[layer.kind], layer)
        seconds += layer_cost(program, layer, own, plan.num_microbatches, prices, training, shared).total_s
    time = {layer.kind: strategy.time for layer, strategy in zip(program.layers, strategies, strict=True)}
    for crossing in boundary_values(program, time, plan.num_microbatches):
        source, target = strategies[crossing.producer], strategies[crossing.reader]
        seconds += sum(transfer_parts_s(
            prices, crossing.tensor, crossing.requires_grad, plan.num_microbatches,
            (source.mesh, source.outputs[crossing.output]), (target.mesh, target.inputs[crossing.input]),
        ))  # fmt: skip
    for name, (mesh, layout) in shared.items():
        stored = 1
        for size in local_shape(program.type_of(name).shape, layout, mesh):
            stored *= size
        dtype, elements = program.type_of(name).dtype, program.type_of(name).num_elements
        rate = optimizer_rate(program, dtype, plan.world_size, prices, training)
        seconds += stored * rate.updated_s + elements * rate.launch_s
    return seconds


def named_as(strategy: LayerStrategy, first: Layer, layer: Layer) -> LayerStrategy:
    def names(each: Layer) -> tuple[str, ...]:
        return (*each.inputs, *each.state, *(name for op in each.ops for name in op.results))

    renamed = dict(zip(names(first), names(layer), strict=True))
    ops = {one.name: other.name for one, other in zip(first.ops, layer.ops, strict=True)}
    reruns = [ops[name] for name in rerun_ops(strategy.recompute)]
    return replace(
        strategy,
        copies=tuple((renamed[name], layout) for name, layout in strategy.copies),
        pieces=tuple((renamed[name], count) for name, count in strategy.pieces),
        recompute=rerun_policy_name(reruns) if reruns else strategy.recompute,
    )


# The law is the search's, whatever the ops: a handful of models, of which layers, shapes and ties differ.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("model", "constraints"),
    [
        *((model, constraints) for model in ("flat", "unet") for constraints in CONSTRAINTS),
        *(
            pytest.param(model, CONSTRAINTS[number % 3], marks=pytest.mark.slow)
            for number, model in enumerate(("vit", "gpt2", "llama", "contrastive"))
        ),
    ],
    ids=str,
)
def test_a_plan_costs_what_it_says(model: str, constraints: tuple[str, ...]) -> None:
    plan = plan_for(model, 4, constraints)
    sum_s = plan.step_time_s + plan.overlapped_s
    assert plan.overlapped_s >= 0
    assert sum_s == pytest.approx(sum(cost.total_s for cost in plan.costs), rel=1e-12)
    assert sum_s == pytest.approx(sum_of_seconds(subject(model).traced.program, plan), rel=1e-9)


# Of the fast tests, `test_a_tighter_memory_limit_never_gives_a_faster_plan` says this.
@pytest.mark.slow
@pytest.mark.parametrize("model", ["flat", "unet"])
def test_more_memory_is_never_slower(model: str) -> None:
    """From the least that any plan needs."""
    program, prices = subject(model).traced.program, quick_prices(4)
    free = search(program, 4, prices, SearchRequest())
    with pytest.raises(InfeasibleError) as caught:
        search(program, 4, prices, SearchRequest(memory_limit_bytes=1.0))
    smallest = float(str(caught.value).partition("the smallest needs ")[2].partition(" GiB")[0]) * 2**30 * 1.001
    limits = sorted([smallest, *(free.peak_memory_bytes * share for share in (0.4, 0.7, 1.0, 1.5))])
    found: list[tuple[float, float]] = []
    for limit in limits:
        try:
            plan = search(program, 4, prices, SearchRequest(memory_limit_bytes=limit))
        except InfeasibleError:
            assert not found, "what fits in less memory fits in more"
            continue
        assert plan.peak_memory_bytes <= limit
        assert plan.step_time_s >= free.step_time_s * (1 - 1e-12)
        found.append((limit, plan.step_time_s))
    assert found
    assert found[-1][1] == pytest.approx(free.step_time_s, rel=1e-12)
    times = [seconds for _, seconds in found]
    assert all(more <= less for less, more in itertools.pairwise(times)), found
