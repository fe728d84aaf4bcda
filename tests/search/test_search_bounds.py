"""What a search says of its own optimum: the gap that it prints, and when it searches again."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.errors import HostMemoryError, InfeasibleError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.ops import count_work
from autopar.program import Op, TensorType
from autopar.search import SearchRequest, TrainingSpec, plan_search, search, search_context
from autopar.search.chain.candidate_sets import least_returned_bytes, make_candidate_set
from autopar.search.chain.least_seconds import least_of
from autopar.search.chain.single_stage import SingleStageSearch
from autopar.search.microbatches.time_assignment import time_assignment
from autopar.search.pipeline.least_compute import least_compute
from autopar.search.pipeline.pipeline_candidates import PipelineResults
from autopar.search.pipeline.pipeline_search import PipelineSearch
from autopar.search.pipeline.relaxed_pipelines import relaxed_bounds
from autopar.search.plan_selection import preferred_s
from autopar.search.search_context import SearchContext, shared_storage_choices
from autopar.search.settings.constraints import LayerDemands, parse_constraints
from autopar.step import pricing
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.prices import OpTime
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

PRICES = TablePrices(devices_per_node=2)
PROGRAM = decoder_model(4, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
PIPELINES = SearchRequest(
    constraints=("pipeline=2", "schedule=1f1b"),
    max_microbatches=4,
    schedules=schedule_actions,
    memory_limit_bytes=3.3e5,
)


def refuse_first(monkeypatch: pytest.MonkeyPatch, error: type[InfeasibleError]) -> list[float]:
    """The first choice of a plan fails so; the limits that pipelines are then searched with."""
    limits: list[float] = []
    select, run = plan_search.select_plan, PipelineSearch.run

    def refuse(*arguments: Any) -> Any:
        if len(limits) == 1:
            raise error("no plan fits")
        return select(*arguments)

    def note(self: PipelineSearch, *known_s: float) -> Any:
        limits.append(self.limit_bytes)
        return run(self, *known_s)

    monkeypatch.setattr(plan_search, "select_plan", refuse)
    monkeypatch.setattr(PipelineSearch, "run", note)
    return limits


@pytest.mark.slow
def test_a_second_search_with_less_memory_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bounds that are raised depend a little on how far that is worth it, which the plan says.
    monkeypatch.setattr(PipelineResults, "raise_bounds", lambda *_: None)
    first = search(PROGRAM, 4, PRICES, PIPELINES)
    limits = refuse_first(monkeypatch, InfeasibleError)
    second = search(PROGRAM, 4, PRICES, PIPELINES)
    assert limits[1] < limits[0]
    first_s, second_s = (preferred_s(plan) for plan in (first, second))
    assert second_s > first_s, "less memory costs nothing here, so this test shows nothing"
    assert (1 + second.optimality_gap) / (1 + first.optimality_gap) == pytest.approx(second_s / first_s)


def test_less_memory_is_no_help_to_hosts_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = refuse_first(monkeypatch, HostMemoryError)
    with pytest.raises(HostMemoryError):
        search(PROGRAM, 4, PRICES, PIPELINES)
    assert len(limits) == 1


@pytest.mark.slow
def test_whole_layers_are_priced_once_for_device_groups_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    place_whole = search_context.place_whole

    def count(program: Any, layer: Any) -> Any:
        placed.append(layer.kind)
        return place_whole(program, layer)

    monkeypatch.setattr(search_context, "place_whole", count)
    search(PROGRAM, 4, PRICES, SearchRequest(max_microbatches=4, schedules=schedule_actions))
    assert sorted(placed) == list(range(len(PROGRAM.kinds)))


@pytest.mark.slow
@pytest.mark.slow
def test_pipelines_that_are_passed_over_for_their_compute_alone_are_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_over: list[tuple[int, int, float]] = []
    is_too_slow = PipelineSearch._is_too_slow

    def note(self: PipelineSearch, context: Any, count: int, *more: Any) -> bool:
        found = is_too_slow(self, context, count, *more)
        if found:
            passed_over.append((context.num_groups, count, more[-1]))
        return found

    monkeypatch.setattr(PipelineSearch, "_is_too_slow", note)
    free = search(PROGRAM, 4, PRICES, SearchRequest(max_microbatches=4, schedules=schedule_actions))
    assert passed_over, "no pipeline was passed over, so this test shows nothing"
    for groups, count, enough_s in passed_over:
        forced = SearchRequest(
            constraints=(f"pipeline={groups}", f"microbatches={count}"), schedules=schedule_actions
        )  # fmt: skip
        found = search(PROGRAM, 4, PRICES, forced)
        assert found.step_time_s >= enough_s * (1 - 1e-9)
        assert preferred_s(found) >= preferred_s(free) * (1 - 1e-9)


@pytest.mark.slow
def test_the_number_of_microbatches_is_the_fastest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the search stops before the largest, as the fastest plan that fits has become slower."""
    stopped: list[int] = []
    slows_down = SingleStageSearch._slows_down

    def note(self: SingleStageSearch) -> bool:
        found = slows_down(self)
        stopped.extend([len(self._fastest_fitting)] * found)
        return found

    monkeypatch.setattr(SingleStageSearch, "_slows_down", note)
    program = decoder_model(3, 16, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
    whole = search(program, 2, PRICES, SearchRequest(constraints=("pipeline=1",), max_microbatches=1))
    limit = 0.4 * whole.peak_memory_bytes
    request = SearchRequest(memory_limit_bytes=limit, constraints=("pipeline=1",), max_microbatches=8)
    free = search(program, 2, PRICES, request)
    assert free.num_microbatches == 2
    for count in (1, 2, 4, 8):
        with suppress(InfeasibleError):
            forced = replace(request, constraints=("pipeline=1", f"microbatches={count}"))
            assert preferred_s(search(program, 2, PRICES, forced)) >= preferred_s(free) * (1 - 1e-9)
    assert stopped, "the search never stopped for that, so this test shows nothing"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("compiled", "recompute"), [(False, ""), (True, "full")])
def test_no_pipeline_is_faster_than_the_least_compute_of_its_layers(compiled: bool, recompute: str) -> None:
    training = TrainingSpec().running(compiled=compiled)
    for schedule, groups, count in (("1f1b", 2, 4), ("zbv", 2, 4), ("gpipe", 2, 2), ("1f1b", 4, 4)):
        constraints = (f"pipeline={groups}", f"microbatches={count}", f"schedule={schedule}")
        constraints += (f"recompute={recompute}",) if recompute else ()
        request = SearchRequest(constraints=constraints, schedules=schedule_actions, training=training)
        plan = search(PROGRAM, 4, PRICES, request)
        demands = tuple(LayerDemands(recompute=recompute) for _ in PROGRAM.layers)
        context = SearchContext(PROGRAM, 4 // groups, PRICES, request, parse_constraints((), 4), demands, groups)
        assignment = time_assignment(PROGRAM, count)
        assert not isinstance(assignment, str)
        tables = least_compute(context, count, assignment.factors)
        shape = plan.decisions.shape
        bound_s = max(relaxed_bounds(tables, shape, shape.actions(schedule_actions), 2 * plan.step_time_s))
        assert 0 < bound_s <= plan.step_time_s
        plain = least_compute(replace(context, demands=(LayerDemands(),) * len(demands)), count, assignment.factors)
        assert any(context.run_again) == bool(recompute)
        for costs, own, again in zip(tables.layers, plain.layers, context.run_again, strict=True):
            again_s = costs.backward_s[0] - own.backward_s[0]
            if again and compiled:  # what backward does not read is left out
                assert 0 < again_s <= own.forward_s[0] * (1 + 1e-9)
            else:
                assert again_s == pytest.approx(bool(again) * own.forward_s[0], abs=1e-12)


def test_no_candidates_beat_what_rules_them_out_before_they_are_made() -> None:
    """Those of fewer microbatches, and of compiled layers; and what the last device group holds of the outputs."""
    prices = ClusterPrices(Cluster.of("h100", devices_per_node=2, nodes=2), None)
    least: dict[tuple[bool, int], npt.NDArray[np.float64]] = {}
    for compiled, count in itertools.product((True, False), (2, 4)):
        request = SearchRequest(schedules=schedule_actions, training=TrainingSpec().running(compiled=compiled))
        demands = (LayerDemands(),) * len(PROGRAM.layers)
        context = SearchContext(PROGRAM, 2, prices, request, parse_constraints((), 4), demands, 2)
        assignment = time_assignment(PROGRAM, count, joins_outputs=True)
        assert not isinstance(assignment, str)
        (shared,) = shared_storage_choices(context)
        candidates = make_candidate_set(context, count, dict(assignment.factors), shared)
        assert candidates is not None
        least[compiled, count] = least_of(candidates)
        last = candidates.tables.layers[-1]
        assert 0 < least_returned_bytes(context) <= (last.static_bytes + last.transient_bytes).min()
    for slower, faster in (((True, 4), (True, 2)), ((False, 2), (True, 2)), ((False, 4), (False, 2))):
        assert (least[slower] >= least[faster] * (1 - 1e-9)).all()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("zero", [1, 3])
def test_no_pipeline_is_faster_than_its_bound_with_everything_overlapped(
    monkeypatch: pytest.MonkeyPatch, schedule: str, zero: int
) -> None:
    """So it is ruled out rightly where that takes longer than another plan."""
    results: list[PipelineResults] = []
    monkeypatch.setattr(PipelineResults, "raise_bounds", lambda self, *_: results.append(self))
    constraints = ("pipeline=2", "microbatches=4", f"schedule={schedule}", f"zero={zero}")
    plan = search(PROGRAM, 4, PRICES, SearchRequest(constraints=constraints, schedules=schedule_actions))
    shape = plan.decisions.shape
    actions, found = shape.actions(schedule_actions), 0
    for candidates in (each.candidates for each in results[0].bounds if each.shape == shape and each.candidates):
        bounds = [
            max(relaxed_bounds(tables, shape, actions, 2 * plan.step_time_s))
            for tables in (candidates.least_tables, candidates.tables)
        ]
        assert 0 < bounds[0] < bounds[1]
        assert bounds[0] <= plan.step_time_s
        found += 1
    assert found


class FlopPrices(TablePrices):
    """An op takes the seconds of its floating-point operations."""

    def op_s(
        self, op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...], differentiable: bool
    ) -> OpTime:
        seconds = 1e-9 * count_work(op, operands, results).flops
        return OpTime(seconds, 2 * seconds if differentiable else 0.0, "table")


def test_least_compute_shares_work_out_and_no_more() -> None:
    # Also where keys and values that travel round a ring lie in slices: each device computes with all of them.
    demands = tuple(LayerDemands() for _ in PROGRAM.layers)
    context = SearchContext(PROGRAM, 4, FlopPrices(), SearchRequest(), parse_constraints((), 4), demands, 1)
    tables = least_compute(context, 1, {kind.kind: ("-",) * len(kind.ops) for kind in PROGRAM.kinds})
    whole_s = [sum(time.forward_s for time in context.whole_s[layer.kind]) for layer in PROGRAM.layers]
    assert max(whole_s) > 0
    assert [4 * costs.forward_s[0] for costs in tables.layers] == pytest.approx(whole_s, rel=1e-9)


def test_of_hundreds_of_paths_those_that_may_be_best_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a deep decoder there are hundreds of paths; by their estimates, two hundred came before the best."""
    simulated: set[tuple[Any, ...]] = set()
    step_seconds = pricing.step_seconds

    def counted(layers: PlannedLayers, *arguments: Any) -> float:
        simulated.add((layers.decisions.strategies, layers.decisions.layers))
        return step_seconds(layers, *arguments)

    monkeypatch.setattr(pricing, "step_seconds", counted)
    program = decoder_model(32, 32, 8192, 128256, hidden=4096, ffn=14336, heads=32, kv_heads=8)
    prices = ClusterPrices(Cluster.of("h100", devices_per_node=8, nodes=8), None)
    plan = search(program, 64, prices, SearchRequest(constraints=("mesh=32x2",), max_microbatches=1))
    assert (plan.strategies, plan.layers) in simulated
    assert len(simulated) <= 20
