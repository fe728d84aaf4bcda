"""Plans with pipeline stages: what is demanded of them, and that they are what their numbers say."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autopar.cluster.hardware import OpTime
from autopar.errors import ConstraintError, HostMemoryError, InfeasibleError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.placement import Axis
from autopar.plan import Plan, Stage
from autopar.plan.prediction import LayerCost
from autopar.program import Layer, Program
from autopar.schedules import schedule_names
from autopar.schedules.action_lists import peak_in_flight
from autopar.search import SearchRequest, TrainingSpec, plan_like, plan_search, search
from autopar.search.pipeline.pipeline_candidates import PipelineCandidate, PipelineResults
from autopar.search.pipeline.pipeline_numbers import dividing_counts
from autopar.step.costs.stage_costs import pipeline_step_s
from autopar.step.prices import HostLink
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

PRICES = TablePrices(devices_per_node=2)


@cache
def model(num_layers: int = 4, *, tied: bool = False) -> Program:
    return decoder_model(num_layers, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2, tied=tied)


@cache
def run(program: Program, *constraints: str, world: int = 4, **more: Any) -> Plan:
    request = SearchRequest(constraints=constraints, max_microbatches=4, schedules=schedule_actions)
    return search(program, world, PRICES, replace(request, **more))


def costs_of(plan: Plan, stage: Stage) -> list[LayerCost]:
    return list(plan.costs[stage.start : stage.stop])


SOUGHT = [
    ("pipeline=2", "schedule=gpipe"),
    ("pipeline=2", "schedule=1f1b", "zero=2"),
    ("pipeline=4", "schedule=1f1b", "recompute=full"),
    ("pipeline=2", "schedule=interleaved_1f1b", "microbatches=2"),
    ("pipeline=2", "schedule=interleaved_zero_bubble", "microbatches=2"),
    ("pipeline=2", "schedule=zbv", "zero=3", "microbatches=4"),
]


# With and without a parameter of both ends by turns.
@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("constraints", "tied"), [(constraints, number % 2 == 1) for number, constraints in enumerate(SOUGHT)], ids=str
)
def test_a_plan_is_what_its_stages_and_costs_say(constraints: tuple[str, ...], tied: bool) -> None:
    plan = run(model(tied=tied), *constraints)
    actions = schedule_actions(plan.schedule, plan.num_groups, len(plan.stages), plan.num_microbatches)
    assert Plan.from_json(plan.to_json()) == plan
    assert pipeline_step_s(plan.decisions.shape, actions, plan.prediction.stages) == pytest.approx(
        plan.step_time_s + plan.overlapped_s, rel=1e-12
    )
    assert plan.peak_memory_bytes == max(cost.peak_memory_bytes for cost in plan.prediction.stages)
    assert plan.optimality_gap >= 0
    broadcast_s = PRICES.collective_s("broadcast", Axis(plan.num_groups, plan.group_size), 4.0)
    held: list[float] = []
    until_weights: list[float] = []
    for index, (stage, found) in enumerate(zip(plan.stages, plan.prediction.stages, strict=True)):
        costs, count = costs_of(plan, stage), plan.num_microbatches
        is_first = stage.group not in [each.group for each in plan.stages[:index]]
        assert found.forward_s == pytest.approx(sum(cost.in_forward_s for cost in costs) / count)
        assert found.backward_s == pytest.approx(sum(cost.in_backward_s for cost in costs) / count)
        assert 0 <= found.weight_s <= found.backward_s
        once_s = sum(cost.in_step_s for cost in costs) + (broadcast_s if is_first else 0.0)
        assert found.step_s == pytest.approx(once_s)
        total_s = sum(cost.total_s for cost in costs)
        assert total_s == pytest.approx(count * (found.forward_s + found.backward_s) + once_s - broadcast_s * is_first)
        held.append(sum(cost.saved_bytes for cost in costs))
        until_weights.append(held[-1] + sum(cost.split_bytes for cost in costs))
    for group, peak in enumerate(peak_in_flight(actions, tuple(held), tuple(until_weights))):
        own = [stage for stage in plan.stages if stage.group == group]
        costs = [cost for stage in own for cost in costs_of(plan, stage)]
        static = sum(cost.static_bytes for cost in costs) + max(cost.transient_bytes for cost in costs)
        # what the search counts: all of a device's memory but what is sent and handed on, as if it were there at once
        assert plan.group_peak_bytes(group) == pytest.approx(peak + static, rel=0.1)


@pytest.mark.slow
def test_a_tied_parameter_is_stored_on_both_ends_and_its_gradient_exchanged() -> None:
    constraints = ("pipeline=2", "schedule=1f1b", "cuts=3", "microbatches=2", "mesh=2", "zero=0")
    tied, untied = (run(model(tied=each), *constraints) for each in (True, False))
    assert [name for name, _ in tied.shared_storage] == ["embedding.weight"]
    for stage, other in zip(tied.stages, untied.stages, strict=True):
        assert tied.group_peak_bytes(stage.group) > 0.5 * untied.group_peak_bytes(other.group)
        ends = [sum(cost.parameter_bytes for cost in costs_of(plan, s)) for plan, s in ((tied, stage), (untied, other))]
        assert ends[0] == pytest.approx(ends[1], rel=0.5)
    assert all(stage.step_s > PRICES.latency_s for stage in tied.prediction.stages)


def test_what_is_demanded_is_done() -> None:
    plan = run(model(), "stages=2", "cuts=2", "schedule=gpipe", "microbatches=4")
    assert [(stage.start, stage.stop, stage.group) for stage in plan.stages] == [(0, 2, 0), (2, 6, 1)]
    assert (plan.schedule, plan.num_microbatches, plan.num_groups) == ("gpipe", 4, 2)
    named = run(model(), "cuts=blocks.1,blocks.3,head", "pipeline=4", "schedule=1f1b", "recompute=none")
    assert [stage.start for stage in named.stages] == [0, 2, 4, 5]
    assert not run(model(), "pipeline=1").stages


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("constraints", "schedules"),
    [
        (("pipeline=2", "microbatches=2"), tuple(name for name in schedule_names() if name != "dualpipev")),
        (("pipeline=2", "microbatches=4"), ("dualpipev",)),
        pytest.param(("pipeline=4",), ("gpipe", "1f1b", "interleaved_zero_bubble"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_schedule_is_faster_than_the_chosen_one(constraints: tuple[str, ...], schedules: tuple[str, ...]) -> None:
    request = SearchRequest(max_microbatches=4, schedules=schedule_actions)
    chosen = search(model(5), 4, PRICES, replace(request, constraints=constraints))
    for schedule in schedules:
        forced = replace(request, constraints=(*constraints, f"schedule={schedule}"))
        assert chosen.step_time_s <= 1.001 * search(model(5), 4, PRICES, forced).step_time_s, schedule


@pytest.mark.slow
def test_a_mesh_is_that_of_one_group() -> None:
    plan = run(model(), "pipeline=2", "mesh=2x2", "schedule=1f1b", world=8)
    assert all(strategy.mesh == (2, 2) for strategy in plan.strategies)


IMPOSSIBLE = [
    (("pipeline=3",), "does not divide"),
    (("pipeline=1", "schedule=1f1b"), "pipeline=1 allows no stages"),
    (("stages=1", "schedule=1f1b"), "no pipeline"),
    (("schedule=1f2b",), "did you mean '1f1b'"),
    (("cuts=2,2",), "ascend"),
    (("cuts=9",), "ascend"),
    (("cuts=nowhere",), "neither a number nor one of"),
    (("cuts=2,3", "stages=2"), "make 3 stages"),
    (("pipeline=2", "stages=3"), "can't be met"),
    (("pipeline=2", "schedule=zbv", "stages=2"), "can't be met"),
    (("stages=7",), "each needs a layer"),
    (("pipeline=2", "mesh=2x2"), "one device group"),
    (("pipeline=2", "tensor=4"), "does not divide"),
    (("pipeline=2", "microbatches=3"), "microbatches=3"),
    (("pipeline=2", "schedule=1f1b", "microbatches=1"), "1f1b needs at least as many microbatches"),
]


@pytest.mark.parametrize(("constraints", "message"), IMPOSSIBLE, ids=str)
def test_what_can_not_be_is_refused(constraints: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        run(model(), *constraints)


def test_a_search_without_schedules_refuses_a_pipeline() -> None:
    with pytest.raises(ConstraintError, match="schedules"):
        run(model(), "pipeline=2", schedules=None)


def test_what_does_not_fit_says_how_large_the_smallest_pipeline_is() -> None:
    with pytest.raises(InfeasibleError, match=r"2 pipeline stages on 2 device groups.* GiB"):
        run(model(), "pipeline=2", "schedule=gpipe", memory_limit_bytes=1e4)


@pytest.mark.slow
def test_more_memory_is_never_slower_and_less_recomputes() -> None:
    constraints = ("pipeline=2", "schedule=1f1b", "microbatches=4")
    free = run(model(), *constraints)
    times = [free.step_time_s + free.overlapped_s]
    for share in (0.9, 0.8, 0.7):
        limit = free.peak_memory_bytes * share
        plan = run(model(), *constraints, memory_limit_bytes=limit)
        assert plan.peak_memory_bytes <= limit
        times.append(plan.step_time_s + plan.overlapped_s)
    assert all(less <= more for less, more in itertools.pairwise(times))
    assert times[-1] > times[0]


@pytest.mark.slow
def test_without_a_gain_there_is_no_pipeline_and_with_dear_collectives_there_is() -> None:
    dear = replace(PRICES, bytes_per_s=1e7, latency_s=1e-3)
    program = model(8)
    cheap_plan = run(program)
    assert not cheap_plan.stages
    found = search(program, 4, dear, SearchRequest(max_microbatches=8, schedules=schedule_actions))
    flat = search(program, 4, dear, SearchRequest(max_microbatches=8))
    assert found.step_time_s <= flat.step_time_s


EVALUATE = SearchRequest(training=TrainingSpec(is_training=False), max_microbatches=1, schedules=schedule_actions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(s, marks=pytest.mark.slow) for s in ("interleaved_1f1b", "zbv"))]
)
def test_evaluation_keeps_parameters_where_they_are(schedule: str) -> None:
    program = model()
    trained = run(program, "pipeline=2", f"schedule={schedule}", "microbatches=2")
    plan = plan_like(program, program, trained, PRICES, EVALUATE)
    assert [(s.start, s.stop, s.group) for s in plan.stages] == [(s.start, s.stop, s.group) for s in trained.stages]
    assert plan.num_microbatches == 1
    assert all(stage.backward_s == 0 for stage in plan.prediction.stages)
    assert not plan_like(program, program, run(program, "pipeline=1"), PRICES, EVALUATE).stages


def test_layers_of_another_trace_go_where_their_parameters_are() -> None:
    program = model()
    trained = run(program, "cuts=3", "schedule=gpipe", "microbatches=2")
    last = len(program.layers) - 1
    joined = join(join(program, last - 1), 1)  # the head with the last block; two blocks in one
    plan = plan_like(joined, program, trained, PRICES, EVALUATE)
    assert [(stage.start, stage.stop) for stage in plan.stages] == [(0, 2), (2, 4)]
    with pytest.raises(ConstraintError, match=r"layer 'blocks.1' needs a stage that holds all it reads"):
        plan_like(join(program, 2), program, trained, PRICES, EVALUATE)


def test_a_call_of_too_few_layers_says_how_many_stages_there_could_be() -> None:
    program = model(tied=True)
    trained = run(program, "pipeline=2", "schedule=gpipe", "microbatches=2")
    alone = replace(program, layers=program.layers[:1])  # what it reads is in both stages
    with pytest.raises(ConstraintError, match=r"the 1 layers .* the 2 stages .*; plan without stages \('pipeline=1'\)"):
        plan_like(alone, program, trained, PRICES, EVALUATE)


def join(program: Program, index: int) -> Program:
    """The program with this layer and the next one as one, of a kind of its own."""
    first, second = program.layers[index : index + 2]
    inner = set(first.outputs)
    inputs = dict.fromkeys((*first.inputs, *(name for name in second.inputs if name not in inner)))
    held = dict.fromkeys((*first.state, *second.state))
    both = Layer(first.name, 0, (*first.ops, *second.ops), tuple(inputs), tuple(held), second.outputs)
    layers = [*program.layers[:index], both, *program.layers[index + 2 :]]
    kinds: dict[tuple[int, ...], int] = {}
    numbered = [replace(layer, kind=kinds.setdefault((layer.kind, len(layer.ops)), len(kinds))) for layer in layers]
    return replace(program, layers=tuple(numbered))


class _SlowDevices(TablePrices):
    """Compute takes so long that two devices should share it, whatever their link costs."""

    def op_s(self, *args: Any, **more: Any) -> OpTime:
        found = super().op_s(*args, **more)
        forward_s = 3000 * (found.forward_s - 1e-6)  # without the launch
        return replace(found, forward_s=forward_s, backward_s=1.7 * forward_s if found.backward_s else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_per_s", "gain"),
    [(5e5, "small"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1e6, "none"), (3e5, "large")))],
    ids=lambda value: str(value),
)
def test_stages_that_nobody_asked_for_must_gain_more_than_predictions_are_off(bytes_per_s: float, gain: str) -> None:
    program, prices = model(), _SlowDevices(devices_per_node=1, bytes_per_s=bytes_per_s)

    def plan_of(*constraints: str) -> Plan:
        request = SearchRequest(constraints=constraints, max_microbatches=8, schedules=schedule_actions)
        return search(program, 2, prices, request)

    free, flat, staged = plan_of(), plan_of("pipeline=1"), plan_of("pipeline=2")
    assert bool(free.stages) == (staged.step_time_s * 1.06 < flat.step_time_s) == (gain == "large")
    assert free.step_time_s == (staged if free.stages else flat).step_time_s
    assert (staged.step_time_s < flat.step_time_s) == (gain != "none")
    notes = [note for note in free.notes if "pipeline=2 forces them" in note]
    assert len(notes) == (gain == "small"), notes


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_what_a_backward_in_two_parts_keeps_between_them_is_counted(schedule: str) -> None:
    """Gradients that wait for W: the walk through the step finds no more than the search counts."""
    program = model(8)
    free = run(program, "pipeline=4", f"schedule={schedule}", "microbatches=4")
    actions = schedule_actions(free.schedule, free.num_groups, len(free.stages), free.num_microbatches)
    assert any(cost.split_bytes > 0 for cost in free.costs)
    held = [sum(cost.saved_bytes for cost in costs_of(free, stage)) for stage in free.stages]
    until_weights = [
        own + sum(cost.split_bytes for cost in costs_of(free, stage))
        for own, stage in zip(held, free.stages, strict=True)
    ]
    for group, peak in enumerate(peak_in_flight(actions, tuple(held), tuple(until_weights))):
        costs = [cost for stage in free.stages if stage.group == group for cost in costs_of(free, stage)]
        counted = peak + sum(cost.static_bytes for cost in costs) + max(cost.transient_bytes for cost in costs)
        assert free.group_peak_bytes(group) <= counted * 1.02  # what is sent and handed on apart


def found_pipelines(monkeypatch: pytest.MonkeyPatch, program: Program, prices: TablePrices, *constraints: str) -> Any:
    """The plan, and all pipelines that the search looked at."""
    found: list[PipelineCandidate] = []
    select = plan_search.select_plan

    def note(searched: Any, pipelines: PipelineResults, *more: Any) -> Any:
        found.extend(pipelines.candidates)
        return select(searched, pipelines, *more)

    monkeypatch.setattr(plan_search, "select_plan", note)
    request = SearchRequest(constraints=constraints, max_microbatches=4, schedules=schedule_actions)
    return search(program, 4, prices, request), found


def test_outputs_of_all_microbatches_are_counted_until_the_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    program = decoder_model(2, 64, 64, 16, hidden=32, ffn=32, heads=4, kv_heads=4)
    hidden = program.layers[-1].inputs[0]
    program = replace(program, outputs=(*program.outputs, hidden))
    constraints = ("pipeline=2", "schedule=1f1b", "microbatches=16", "recompute=full")
    plan, found = found_pipelines(monkeypatch, program, PRICES, *constraints)
    counted = min(each.peak_bytes for each in found if each.decisions() == plan.decisions)
    batch_bytes = 2 * 64 * 64 * 8  # of the caller's, which is no part of what is counted
    assert plan.peak_memory_bytes - batch_bytes <= counted * 1.02  # what is sent and handed on apart


@pytest.mark.slow
def test_pipelines_offload_no_more_than_hosts_have_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All microbatches of GPipe are in flight, twice as many as a host has room for if all layers offload."""
    program = decoder_model(4, 32, 64, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
    constraints = ("pipeline=2", "schedule=gpipe", "microbatches=4")

    def planned(limit: float, room: float, *more: str) -> Any:
        link = HostLink(bytes_per_s=1e13, latency_s=1e-9, memory_bytes=room, taken=0.001)
        prices = replace(PRICES, host_link=link, memory_bytes=limit)
        return found_pipelines(monkeypatch, program, prices, *constraints, *more)

    limit = 1.6e6  # of the 3.6e6 bytes that the fastest plan takes
    free, found = planned(limit, 1e12)
    needed = free.prediction.host_memory_bytes
    assert needed == min(each.host_bytes for each in found if each.decisions() == free.decisions) > 0
    less, _ = planned(limit, 0.75 * needed)
    assert less.prediction.host_memory_bytes <= 0.75 * needed
    assert less.peak_memory_bytes <= limit
    with pytest.raises(HostMemoryError, match="offload fewer layers"):
        planned(limit, 0.75 * needed, "recompute=none", "offload=activations")


@pytest.mark.parametrize(
    ("batch", "data", "devices", "counts"),
    [
        (64, 1, 4, [2, 4, 8, 16, 32]),
        (8, 1, 64, [2, 4, 8]),
        (96, 1, 1, [2, 4, 8, 16, 32]),  # a device has rows of each
        (96, 1, 8, [2, 3, 4, 6, 12, 24]),  # 8 devices share 96 rows in 12 microbatches evenly, and in 8 they don't
        (96, 8, 8, [2, 3, 4, 6, 12]),  # each device is to have a row
        (2 * 509, 1, 8, [2]),  # too many
        (1, 1, 8, []),
    ],
)
def test_microbatches_divide_over_the_devices_of_a_group(
    batch: int, data: int, devices: int, counts: list[int]
) -> None:
    assert dividing_counts(batch, data, devices, 32) == counts
