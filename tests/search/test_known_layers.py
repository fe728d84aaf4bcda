"""What searches of one planning share, and what a plan that is known spares the next search."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning import logits
from autopar.planning.call_traces import trace_model
from autopar.planning.logits import search_plan
from autopar.program import Program
from autopar.search import SearchRequest, plan_search, search
from autopar.search.chain import candidate_sets
from autopar.search.chain.single_stage import SingleStageSearch
from autopar.search.layer import layer_pricing
from autopar.search.pipeline import pipeline_search
from autopar.search.pipeline.pipeline_candidates import PipelineResults
from autopar.search.pipeline.pipeline_constraints import pipeline_demands
from autopar.search.pipeline.pipeline_numbers import PipelineNumbers
from autopar.search.pipeline.pipeline_search import PipelineSearch
from autopar.search.plan_selection import preferred_s
from autopar.search.search_context import SearchContext
from autopar.search.settings.constraints import demands_on, parse_constraints
from autopar.search.settings.known_layers import KnownLayers
from autopar.search.settings.request import NoMatchError
from autopar.step.variants.logits import in_pieces
from tests.models import make_llama


@cache
def program() -> Program:
    return trace_model(*make_llama()).program


@cache
def prices() -> ClusterPrices:
    return ClusterPrices(Cluster.of("h100", devices_per_node=4))


def count_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of layers whose candidates are made from now on."""
    made: list[str] = []
    original = candidate_sets.layer_candidates

    def counted(work, meshes, demands, **given):
        made.append(work.layer.name)
        return original(work, meshes, demands, **given)

    monkeypatch.setattr(candidate_sets, "layer_candidates", counted)
    return made


@pytest.mark.slow
def test_logits_in_pieces_need_candidates_of_the_last_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_made(monkeypatch)
    request = SearchRequest(schedules=schedule_actions)
    search(program(), 2, prices(), request)
    every = set(made)
    made.clear()
    pieces = in_pieces(program(), 8)
    shared = search(pieces, 2, prices(), request)
    assert set(made) < every
    assert set(made) == {pieces.layers[-1].name}
    assert shared.decisions == search(pieces, 2, prices(), SearchRequest(schedules=schedule_actions)).decisions


@pytest.mark.slow
def test_other_prices_and_compiled_layers_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_made(monkeypatch)
    request = SearchRequest()
    search(program(), 2, prices(), request)
    names = sorted(made)
    for other, asked in (
        (ClusterPrices(Cluster.of("a100", devices_per_node=4)), request),
        (prices(), replace(request, training=request.training.running(compiled=True))),
    ):
        made.clear()
        assert search(program(), 2, other, asked).decisions == search(program(), 2, other, replace(
            asked, known=type(asked.known)())).decisions  # fmt: skip
        assert set(made) == set(names)


def test_bounds_are_raised_only_of_a_plan_that_beats_its_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[float] = []
    original = PipelineResults.raise_bounds
    monkeypatch.setattr(
        PipelineResults, "raise_bounds", lambda self, *asked: raised.append(asked[0]) or original(self, *asked)
    )
    request = SearchRequest(schedules=schedule_actions)
    free = search(program(), 2, prices(), request)
    assert raised
    raised.clear()
    with pytest.raises(NoMatchError):
        search(program(), 2, prices(), replace(request, rival_s=0.9 * preferred_s(free)))
    assert not raised
    faster = search(program(), 2, prices(), replace(request, rival_s=1.1 * preferred_s(free)))
    assert faster.decisions == free.decisions


def test_only_the_plan_that_is_taken_gets_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[SearchRequest] = []
    sought: list[float] = []
    original = plan_search._optimality_gap

    def seek(*asked: Any) -> float:
        sought.append(original(*asked))
        return sought[-1]

    monkeypatch.setattr(plan_search, "_optimality_gap", seek)

    def find(own: Program, asked: SearchRequest) -> Plan:
        searched.append(asked)
        return search(own, 2, prices(), asked)

    # What recomputes counts as short of memory, and eager layers may then be faster.
    plan = search_plan(None, find, program(), prices(), SearchRequest(constraints=("recompute=full",)), 2)
    assert len(searched) > 1, "one search was enough, so this test shows nothing"
    assert sought == [plan.optimality_gap]
    assert plan.planning_s[-1][0] == "bounds"


def test_whether_to_compile_is_asked_again_with_logits_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole logits may be why the layers of the first plan are eager."""
    found = search(program(), 2, prices(), SearchRequest(schedules=schedule_actions))
    eager = replace(found, memory_limit_bytes=1.01 * found.peak_memory_bytes)
    faster = replace(found.prediction, step_time_s=found.step_time_s / 2)
    compiled = replace(eager.with_decisions(compiled=True), prediction=faster)

    def find(way: bool | None, _: Any, own: Program, *__: Any) -> Plan:
        return compiled if own.piece_tokens and way is None else eager

    monkeypatch.setattr(logits, "search_compiled", find)
    monkeypatch.setattr(logits, "logits_bytes", lambda _: found.peak_memory_bytes)  # take a noticeable part of it
    assert search_plan(None, search, program(), prices(), SearchRequest(), 2).compiled
    assert not search_plan(False, search, program(), prices(), SearchRequest(), 2).compiled


def test_where_whole_logits_take_much_memory_pieces_are_searched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, float]] = []
    found: list[Plan] = []

    def find(own: Program, request: SearchRequest) -> Plan:
        asked.append((own.piece_tokens, request.rival_s))
        found.append(search(own, 2, prices(), request))
        return found[-1]

    monkeypatch.setattr(logits, "logits_bytes", lambda _: prices().memory_bytes)
    plan = search_plan(False, find, program(), prices(), SearchRequest(), 2)
    assert asked == [(logits.PIECE_TOKENS, math.inf), (0, pytest.approx(1.02 * preferred_s(found[0])))]
    assert plan.decisions == found[1].decisions  # of a small model they take no longer

    def slow(own: Program, request: SearchRequest) -> Plan:
        made = find(own, request)
        slower = replace(made.prediction, step_time_s=1.1 * found[0].step_time_s)
        return made if own.piece_tokens else replace(made, prediction=slower)

    assert search_plan(False, slow, program(), prices(), SearchRequest(), 2).decisions.piece_tokens


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("piece_tokens", "flat_s", "begins"), [(0, 1.1, False), (0, 1.03, True), (64, 1.1, True)])
def test_plans_without_stages_that_were_far_too_slow_are_not_searched_again(
    monkeypatch: pytest.MonkeyPatch, piece_tokens: int, flat_s: float, begins: bool
) -> None:
    """Nor of eager layers; logits in pieces may make them faster."""
    begun: list[bool] = []
    begin = SingleStageSearch.begin
    monkeypatch.setattr(SingleStageSearch, "begin", lambda self: begun.append(True) or begin(self))
    request = SearchRequest(schedules=schedule_actions, rival_s=1.0)
    request.known.flat_s = flat_s
    search(in_pieces(program(), piece_tokens), 2, prices(), request)
    assert bool(begun) == begins


@pytest.mark.slow
def test_a_search_under_other_constraints_shares_candidates_and_finds_what_it_finds_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = SearchRequest(schedules=schedule_actions)
    search(program(), 2, prices(), replace(first, constraints=("pipeline=2",)))
    assert first.known.numbers != (0, 0)
    known = first.known.for_other_constraints()
    assert known.numbers == (0, 0)
    search(program(), 2, prices(), replace(first, known=known))
    made = count_made(monkeypatch)
    again = replace(first, constraints=("pipeline=1",), known=known.for_other_constraints())
    shared = search(program(), 2, prices(), again)
    assert not made
    alone = search(program(), 2, prices(), SearchRequest(schedules=schedule_actions, constraints=("pipeline=1",)))
    assert made
    assert shared.decisions == alone.decisions


@pytest.mark.slow
def test_other_demands_on_activations_and_storage_share_problems_and_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    costs: list[Any] = []
    problem, running = layer_pricing.LayerProblem, layer_pricing.running_costs
    monkeypatch.setattr(layer_pricing, "LayerProblem", lambda *own: built.append(own[1].name) or problem(*own))
    monkeypatch.setattr(layer_pricing, "running_costs", lambda *own: costs.append(own[1]) or running(*own))

    def planned(known: KnownLayers, *constraints: str) -> Plan:
        asked = SearchRequest(schedules=schedule_actions, constraints=("pipeline=1", *constraints), known=known)
        return search(program(), 2, prices(), asked)

    known = KnownLayers()
    planned(known)
    for constraint in ("zero=3", "recompute=full", "offload=none"):
        built.clear(), costs.clear()
        shared = planned(known.for_other_constraints(), constraint)
        assert not built
        num_shared = len(costs)
        costs.clear()
        alone = planned(KnownLayers(), constraint)
        assert built
        assert num_shared < len(costs)
        assert shared.decisions == alone.decisions
        assert shared.prediction == alone.prediction


@pytest.mark.parametrize(
    ("known_tokens", "piece_tokens", "expected"),
    [(0, 0, [(2, 8)]), (0, 64, [(2, 8), (4, 8), (4, 16), (8, 16)]), (64, 64, [(2, 8)]), (64, 0, [(2, 8)])],
)
def test_numbers_that_are_slow_with_logits_in_pieces_are_no_reason_to_try_no_others(
    known_tokens: int, piece_tokens: int, expected: list[tuple[int, int]]
) -> None:
    """Whole logits may have left no room for others; a search of the same program with eager layers ends there, and one
    with whole logits behind one with pieces.
    """
    own = replace(program(), piece_tokens=piece_tokens)
    request, nothing = SearchRequest(schedules=schedule_actions), parse_constraints((), 8)
    request.known.numbers, request.known.piece_tokens = (2, 8), known_tokens
    context = SearchContext(own, 8, prices(), request, nothing, demands_on(own, nothing))
    demands = pipeline_demands(nothing, own, 8, is_training=True)
    pipelines = PipelineSearch(context, schedule_actions, demands, math.inf, _enough_s=5.0)
    tried: list[tuple[int, int]] = []

    def attempt(groups: int, count: int) -> float:
        tried.append((groups, count))
        return {(2, 8): 6.0, (4, 8): 4.0, (4, 16): 3.0}.get((groups, count), 7.0)

    pipelines._walk_to_best({2: [8], 4: [8, 16], 8: [16]}, attempt)
    assert tried == expected


@pytest.mark.parametrize(("found_s", "is_refined"), [(6.0, False), (5.05, True), (4.0, True), (None, True)])
def test_pipelines_that_are_no_match_are_not_refined(
    monkeypatch: pytest.MonkeyPatch, found_s: float | None, is_refined: bool
) -> None:
    nothing = parse_constraints((), 8)
    request = SearchRequest(schedules=schedule_actions)
    context = SearchContext(program(), 8, prices(), request, nothing, demands_on(program(), nothing))
    demands = pipeline_demands(nothing, program(), 8, is_training=True)
    refined: list[PipelineResults] = []

    def attempt(_: PipelineSearch, results: PipelineResults, groups: int, count: int) -> float:
        shape = SimpleNamespace(num_groups=groups, num_microbatches=count)
        found: Any = SimpleNamespace(
            step_s=found_s, peak_bytes=1.0, has_host_room=True, shape=shape, inner_sizes=frozenset[int]()
        )
        results.candidates += [] if found_s is None else [found]
        return math.inf if found_s is None else found_s

    monkeypatch.setattr(PipelineSearch, "_try", attempt)
    monkeypatch.setattr(pipeline_search, "refine", lambda results, **_: refined.append(results))
    results = PipelineSearch(context, schedule_actions, demands, math.inf).run(enough_s=5.0)
    assert refined == ([results] if is_refined else [])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # More on 4 groups are faster, so fewer there are not; fewer on 2 groups are, so more there are not.
        (
            {(4, 8): 5.0, (4, 16): 4.0, (4, 32): 4.5, (2, 8): 3.0, (2, 4): 2.9, (2, 2): 3.5},
            [(4, 8), (4, 16), (4, 32), (2, 8), (2, 4), (2, 2)],
        ),
        ({(4, 8): 4.0, (2, 4): 3.0, (2, 8): 2.5}, [(4, 8), (4, 16), (4, 4), (2, 4), (2, 2), (2, 8), (2, 16)]),
    ],
)
def test_a_walk_leaves_out_numbers_of_microbatches_behind_a_slower_one(
    seconds: dict[tuple[int, int], float], expected: list[tuple[int, int]]
) -> None:
    own, request, nothing = program(), SearchRequest(schedules=schedule_actions), parse_constraints((), 8)
    context = SearchContext(own, 8, prices(), request, nothing, demands_on(own, nothing))
    demands = pipeline_demands(nothing, own, 8, is_training=True)
    tried: list[tuple[int, int]] = []

    def attempt(groups: int, count: int) -> float:
        tried.append((groups, count))
        return seconds.get((groups, count), 9.0)

    pipelines = PipelineSearch(context, schedule_actions, demands, math.inf)
    pipelines._walk_to_best({2: [2, 4, 8, 16], 4: [4, 8, 16, 32]}, attempt)
    assert tried == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({2: 3.0, 4: 2.0, 8: 2.5, 16: 3.0}, [2, 4, 8]),
        ({2: 3.0, 4: 2.0, 8: 1.5, 16: 1.6}, [2, 4, 8, 16]),
        ({2: 1e9, 4: 1e9, 8: 3.0, 16: 2.0}, [2, 4, 8, 16]),  # with few, groups idle too long: that says nothing of more
        ({2: math.inf, 4: math.inf, 8: 3.0, 16: 2.0}, [2, 4, 8, 16]),  # with few, nothing fits
    ],
)
def test_more_microbatches_are_tried_as_long_as_twice_as_many_were_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], expected: list[int]
) -> None:
    own, request = program(), SearchRequest(schedules=schedule_actions)
    demanded = parse_constraints(("pipeline=2",), 8)
    context = SearchContext(own, 8, prices(), request, demanded, demands_on(own, demanded))
    demands = pipeline_demands(demanded, own, 8, is_training=True)
    tried: list[int] = []

    def attempt(self: PipelineSearch, results: PipelineResults, groups: int, count: int) -> float:
        tried.append(count)
        return seconds.get(count, math.inf)

    monkeypatch.setattr(PipelineSearch, "_try", attempt)
    monkeypatch.setattr(PipelineNumbers, "counts", lambda self: ({2: [2, 4, 8, 16]}, ()))
    PipelineSearch(context, schedule_actions, demands, math.inf).run()
    assert [count for count in tried if count > 1] == expected
