"""A simulated step runs what is priced, hides no more than it may, and is what the closed forms say where there are."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import HostLink
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, TrainingSpec, search
from autopar.step.costs.plan_collectives import plan_collectives
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.simulation.simulate import Streams, simulate_step, step_seconds
from autopar.step.simulation.step_work import Item
from autopar.timeline import StepTimeline
from benchmarks.published.overlap import both_s, gathered_ahead_s
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

FREE, ALL_TAKEN = TablePrices(devices_per_node=2, taken=0.0), TablePrices(devices_per_node=2, taken=1.0)
PLANS = [
    ("pipeline=1", "data=4", "zero=0"),
    ("pipeline=1", "data=4", "zero=1", "microbatches=2"),
    ("pipeline=1", "data=4", "zero=2", "microbatches=2"),
    ("pipeline=1", "data=2", "tensor=2", "zero=3", "recompute=full", "microbatches=2"),
    ("pipeline=2", "schedule=1f1b", "data=2", "zero=2"),
    ("pipeline=2", "schedule=zbv", "data=2", "zero=0", "microbatches=4"),
    ("pipeline=2", "schedule=interleaved_zero_bubble", "microbatches=4", "zero=3"),
]
FLAT = [constraints for constraints in PLANS if "pipeline=1" in constraints]


@cache
def model() -> Program:
    return decoder_model(3, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2, tied=True)


@cache
def planned(*constraints: str) -> tuple[Program, Plan]:
    program = model()
    request = SearchRequest(constraints=constraints, max_microbatches=4, schedules=schedule_actions)
    return program, search(program, 4, FREE, request)


def simulate(program: Program, plan: Plan, prices: TablePrices = FREE, detail: str = "layers") -> StepTimeline:
    return simulate_step(program, plan, prices, TrainingSpec(), schedule_actions, detail=detail)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", PLANS, ids=str)
def test_every_collective_and_every_second_that_is_priced_runs(constraints: tuple[str, ...]) -> None:
    program, plan = planned(*constraints)
    step = simulate(program, plan)
    assert step.step_s == pytest.approx(plan.step_time_s, rel=1e-12)
    for group in range(plan.num_groups):
        ran = Counter(
            (event.name, event.detail.split()[0], int(event.detail.split()[2]), event.num_bytes)
            for event in step.events
            if event.group == group and event.stream != "compute"
        )
        priced = Counter[tuple[str, str, int, float]]()
        for run in plan_collectives(program, plan, group=group):
            priced[run.value, run.kind, run.axis.size, run.num_bytes] += run.times
        assert ran == priced
    costs = plan.costs
    moved = ("gather", "reduce", "send", "broadcast")
    spent_s = sum(event.seconds for event in step.events if event.category not in moved)
    assert spent_s == pytest.approx(sum(cost.total_s - cost.parameter_comm_s for cost in costs), rel=1e-9)
    for category, field in (("forward", "forward_s"), ("optimizer", "optimizer_s")):
        seconds = sum(event.seconds for event in step.events if event.category == category)
        assert seconds == pytest.approx(sum(getattr(cost, field) for cost in costs), rel=1e-9)


def test_parameters_of_a_layer_travel_in_one_buffer() -> None:
    program, plan = planned("pipeline=1", "data=4", "zero=3", "recompute=none")
    events = simulate(program, plan).events
    found = defaultdict[tuple[int, str, int], list[float]](list)
    for event in events:
        if event.category in ("gather", "reduce"):
            found[event.layer, event.detail, event.category == "reduce"] += [event.seconds, event.num_bytes]
    assert {layer for layer, _, _ in found} == set(range(len(program.layers)))
    for (layer, detail, is_reduce), pairs in found.items():
        uses = 1 if is_reduce or layer == 0 else 2  # the embedding keeps nothing that its backward needs
        kind, size = detail.split()[0], int(detail.split()[2])
        together_s = uses * FREE.collective_s(kind, Axis(size, 1), sum(pairs[1::2]) / uses)
        assert sum(pairs[::2]) == pytest.approx(together_s, rel=1e-9)


@pytest.mark.parametrize("constraints", PLANS, ids=str)
def test_streams_do_one_thing_at_a_time_and_a_trace_has_no_overlap(constraints: tuple[str, ...]) -> None:
    step = simulate(*planned(*constraints), replace(FREE, taken=0.2))
    assert "compute" in {event.stream for event in step.events}
    streams = ("compute", "communication", "parameters")
    for group, stream in itertools.product({event.group for event in step.events}, streams):
        events = step.on(group, stream)
        assert all(event.stop_s <= step.step_s * (1 + 1e-12) for event in events)
        assert all(one.stop_s <= other.start_s + 1e-12 for one, other in itertools.pairwise(events))
    threads = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for event in json.loads(step.to_chrome())["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, threads.values())) == len(step.events)
    for spans in threads.values():
        assert spans == sorted(spans)
        assert all(one[1] <= other[0] + 1e-6 for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("constraints", FLAT, ids=str)
def test_what_is_hidden_is_between_nothing_and_the_smaller_stream(constraints: tuple[str, ...]) -> None:
    program, plan = planned(*constraints)
    sum_s = sum(cost.total_s for cost in plan.costs)
    step = simulate(program, plan)
    spent_s = sum(event.seconds for event in step.events)
    assert spent_s <= sum_s
    assert simulate(program, plan, ALL_TAKEN).step_s == pytest.approx(spent_s, rel=1e-9)
    assert step.step_s >= max(step.busy_s(0, "compute"), step.busy_s(0, "communication"))
    times = [simulate(program, plan, replace(FREE, taken=taken)).step_s for taken in (0.0, 0.3, 0.6)]
    assert times == sorted(times)
    assert times[0] < times[-1] < spent_s, "reductions run beside the backward of the layer before"


@pytest.mark.parametrize("constraints", PLANS, ids=str)
def test_the_seconds_are_those_of_every_detail(constraints: tuple[str, ...]) -> None:
    program, plan = planned(*constraints)
    layers, actions = simulate(program, plan), simulate(program, plan, detail="actions")
    everything = PlannedLayers(program, plan.decisions)
    assert step_seconds(everything, FREE, TrainingSpec(), schedule_actions) == layers.step_s
    assert actions.step_s == layers.step_s
    assert len(actions.events) < len(layers.events)
    for group in range(plan.num_groups):
        sizes = [sum(e.num_bytes for e in step.events if e.group == group) for step in (layers, actions)]
        assert sizes[0] == pytest.approx(sizes[1])


def test_copies_to_the_host_overlap_with_computing_and_communicating() -> None:
    streams = Streams()
    ticket = streams.start([Item("offload", "x", 5.0, detail="2 tensors")], on_host=True)
    gathered = streams.start([Item("gather", "w", 2.0, detail="all_gather")])
    streams.run(Item("forward", "layer", 1.0))
    streams.wait(gathered)
    streams.run(Item("activation communication", "y", 1.5, detail="all_reduce"))
    assert streams.now_s == 3.5
    streams.wait(ticket, on_host=True)
    assert streams.now_s == 5.0, "what does not overlap is waited for"


@pytest.mark.slow
def test_a_layer_that_offloads_waits_for_what_takes_longer_than_the_next_one() -> None:
    seconds: dict[float, float] = {}
    for rate in (1e9, 2e9, 1e13):
        prices = replace(FREE, host_link=HostLink(rate, memory_bytes=1e12))
        constraints = ("data=4", "recompute=none", "offload=activations", "zero=0", "pipeline=1")
        program = model()
        plan = search(program, 4, prices, SearchRequest(constraints=constraints, schedules=schedule_actions))
        step = simulate(program, plan, prices)
        copies = [event for event in step.events if event.stream == "host"]
        assert {event.category for event in copies} == {"offload", "fetch"}
        by_layer = {e.layer: e.stop_s for e in step.events if e.stream == "compute" and e.category == "forward"}
        assert all(e.start_s >= by_layer[e.layer] for e in copies if e.category == "offload")
        seconds[rate] = step.step_s
    _, kept = planned("data=4", "recompute=none", "offload=none", "zero=0", "pipeline=1")
    assert seconds[1e9] > seconds[2e9] > seconds[1e13]
    assert seconds[1e13] == pytest.approx(simulate(program, kept).step_s, rel=0.01), "free copies cost nothing"


SECONDS = st.floats(0.01, 100)


@given(SECONDS, SECONDS, st.floats(0, 0.9))
def test_a_pair_is_what_the_closed_form_says(compute_s: float, communication_s: float, taken: float) -> None:
    streams = Streams()
    ticket = streams.start([Item("gather", "w", communication_s, detail="all_gather", taken=taken)])
    streams.run(Item("forward", "layer", compute_s))
    streams.wait(ticket)
    assert streams.now_s == pytest.approx(both_s(compute_s, communication_s, taken))


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6), st.floats(0, 0.9))
def test_gathers_one_layer_ahead_are_what_the_closed_form_says(layers: list[tuple[float, float]], taken: float) -> None:
    def gathers(of: list[tuple[float, float]]) -> list[Item]:
        return [Item("gather", "w", seconds, detail="all_gather", taken=taken) for _, seconds in of]

    streams = Streams()
    streams.wait(streams.start(gathers(layers[:1])))
    for number, (compute_s, _) in enumerate(layers):
        ticket = streams.start(gathers(layers[number + 1 : number + 2]))
        streams.run(Item("forward", "layer", compute_s))
        streams.wait(ticket)
    assert streams.now_s == pytest.approx(gathered_ahead_s(layers, taken))


@pytest.mark.parametrize(
    ("axis", "ends_s"),
    [
        (Axis(2, 2), (5.0, 8.0)),  # between nodes of 2: "a" goes on beside "x"
        (Axis(4, 1), (8.0, 11.0)),  # inside them, too: "x" waits for "a", and "b" for "x"
        (Axis(2, 1), (8.0, 11.0)),
    ],
    ids=str,
)
def test_what_travels_between_nodes_goes_on_beside_what_travels_inside_them(
    axis: Axis, ends_s: tuple[float, float]
) -> None:
    streams = Streams()
    streams.start([Item("reduce", name, 4.0, detail="all_reduce", links=axis.links(2)) for name in "ab"])
    streams.run(Item("backward", "layer", 1.0))
    streams.run(Item("activation communication", "x", 3.0, detail="all_to_all", links=Axis(2, 1).links(2)))
    streams.run(Item("backward", "layer", 1.0))
    assert streams.now_s == ends_s[0]
    streams.wait(2)
    assert streams.now_s == ends_s[1]


def test_what_computing_waits_for_goes_first() -> None:
    streams = Streams()
    gathers = [Item("gather", name, 2.0, detail="all_gather") for name in "ab"]
    streams.start(gathers)
    streams.run(Item("forward", "layer", 1.0))
    streams.run(Item("activation communication", "x", 1.0, detail="all_reduce"))
    assert [(ran.item.name, ran.start_s) for ran in streams.ran] == [("layer", 0.0), ("a", 0.0), ("x", 2.0)]
    streams.wait(2)
    assert streams.now_s == 5.0
