"""What plans take at least, with all overlapped that may be: no simulated step takes less."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cluster import HostLink
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Decisions
from autopar.schedules import Shape
from autopar.search import SearchRequest, TrainingSpec, plan_search, search
from autopar.search.chain.lagrangian import PathPool
from autopar.search.chain.single_stage import SingleStagePaths
from autopar.search.final_candidates import MemoryFilter, PlanCandidate
from autopar.search.pipeline.pipeline_candidates import PipelineResults
from autopar.search.pipeline.pipeline_search import _lies_behind
from autopar.search.pipeline.schedule_estimates import idle_of
from autopar.search.plan_selection import select_plan
from autopar.step.pricing import StepPricing
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

PROGRAM = decoder_model(3, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2, tied=True)
PRICES = TablePrices(devices_per_node=2, host_link=HostLink(1e10, memory_bytes=1e12))
CASES = [
    ("zero=2", "microbatches=2"),
    ("zero=3", "recompute=full"),
    ("offload=activations", "pipeline=2", "schedule=gpipe"),
    ("pipeline=2", "schedule=1f1b", "zero=1", "microbatches=4"),
    ("pipeline=2", "schedule=zbv", "zero=3", "recompute=selective"),
]


def looked_at(
    monkeypatch: pytest.MonkeyPatch, constraints: tuple[str, ...]
) -> tuple[list[SingleStagePaths], list[PipelineResults]]:
    """What a search looked at."""
    searched: list[SingleStagePaths] = []
    results: list[PipelineResults] = []

    def note(_: SearchRequest, own: list[SingleStagePaths], pipelines: PipelineResults | None) -> None:
        searched.extend(own)
        results.extend([pipelines] if pipelines else [])

    monkeypatch.setattr(plan_search, "_report_considered", note)
    search(PROGRAM, 4, PRICES, SearchRequest(None, TrainingSpec(), constraints, 4, schedules=schedule_actions))
    return searched, results


def simulated_s(decisions: Decisions) -> float:
    return StepPricing(PROGRAM, decisions, PRICES, TrainingSpec(), schedule_actions).step_s


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", [pytest.param((), marks=pytest.mark.slow), *CASES], ids=str)
def test_no_step_takes_less_than_the_least(monkeypatch: pytest.MonkeyPatch, constraints: tuple[str, ...]) -> None:
    searched, results = looked_at(monkeypatch, constraints)
    pairs = [
        (simulated_s(paths.decisions(path)), paths.least_s[path]) for paths in searched for path in paths.front[::29]
    ]
    for pipelines in results:
        bounds = {(id(each.candidates), each.shape): each for each in pipelines.bounds}
        pipelines.raise_bounds(2 * pipelines.best_s)
        for found in pipelines.fitting[::5]:
            seconds = simulated_s(found.decisions())
            pairs += [(seconds, found.least_s), (seconds, bounds[id(found.candidates), found.shape].bound_s)]
    assert pairs
    assert all(seconds >= least_s * (1 - 1e-9) > 0 for seconds, least_s in pairs)
    assert min(seconds / least_s for seconds, least_s in pairs) < 1.2, "the bounds say nothing"


def test_copies_to_the_host_overlap_with_collectives_of_activations() -> None:
    """As in simulated steps, which so take no longer than what their layers take by themselves."""
    prices = TablePrices(devices_per_node=2, host_link=HostLink(1e6, memory_bytes=1e12))
    constraints = ("tensor=4", "zero=0", "offload=activations", "pipeline=1", "microbatches=1")
    plan = search(PROGRAM, 4, prices, SearchRequest(None, TrainingSpec(), constraints))
    costs = [each for each in plan.prediction.costs if each.copies_s and each.forward_comm_s]
    assert costs
    for cost in costs:
        exposed_s = prices.host.exposed_s(cost.copies_s, cost.forward_s + cost.forward_comm_s)
        assert cost.leave_s == pytest.approx(exposed_s)
        assert cost.leave_s < prices.host.exposed_s(cost.copies_s, cost.forward_s)


@pytest.mark.parametrize(
    ("shape", "fill_share"),
    [
        (Shape("gpipe", 4, 4, 8), 1.0),
        (Shape("1f1b", 4, 4, 8), 1.0),
        (Shape("interleaved_1f1b", 4, 8, 8), (2 + 3) / 8),  # the bubble is half of that of 1F1B
    ],
    ids=str,
)
def test_idle_time_is_that_of_the_schedule(shape: Shape, fill_share: float) -> None:
    idle = idle_of(shape, shape.actions(schedule_actions))
    assert idle.fill_share == pytest.approx(fill_share)
    assert idle.split_gain == 0


def test_split_backwards_gain_less_the_more_microbatches_there_are() -> None:
    shapes = [Shape("zbv", 4, 8, count) for count in (8, 16, 32)]
    gains = [idle_of(shape, shape.actions(schedule_actions)).split_gain for shape in shapes]
    assert 1 >= gains[0] > gains[1] > gains[2] > 0


@pytest.mark.slow
def test_equal_layers_are_tried_in_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = ("pipeline=1", "microbatches=2", "mesh=4")
    searched, _ = looked_at(monkeypatch, constraints)
    request, num_faster, paths = SearchRequest(None, TrainingSpec(), constraints), 0, searched[-1]
    for path in (path for path in paths.front if len(paths.orders(path)) > 1):
        pool = PathPool(paths.pool.chain)
        pool.add(paths.pool.paths[path])
        alone = replace(paths, pool=pool, least_s=paths.least_s[[path]], plans={}, walked_bytes={}, _orders={})
        own_s = [simulated_s(alone.decisions(0, order)) for order in range(len(alone.orders(0)))]
        num_faster += min(own_s) < own_s[0]
        selected = select_plan([alone], None, math.inf, 0.0, request)
        assert selected is not None
        assert selected[0].step_time_s == pytest.approx(min(own_s), rel=1e-9)
    assert num_faster, "orders make no difference here, so this test shows nothing"


def test_what_is_clearly_slower_is_not_tried_in_other_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = ("pipeline=1", "microbatches=2")
    searched, _ = looked_at(monkeypatch, constraints)
    # As if overlap might hide everything, so that also slow paths are simulated.
    paths = replace(searched[-1], least_s=0 * searched[-1].least_s, plans={}, walked_bytes={})
    looked, seconds = list[tuple[int, int]](), dict[int, float]()
    may_fit = MemoryFilter.may_fit

    def noted(memory: MemoryFilter, candidate: PlanCandidate) -> bool:
        looked.append(candidate.number)
        seconds.setdefault(candidate.number[0], candidate.pricing.step_s)  # of its first order
        return may_fit(memory, candidate)

    monkeypatch.setattr(MemoryFilter, "may_fit", noted)
    selected = select_plan([paths], None, math.inf, 0.0, SearchRequest(None, TrainingSpec(), constraints))
    assert selected is not None
    slow = {path for path, each in seconds.items() if each > 1.03 * selected[0].step_time_s}
    assert any(len(paths.orders(path)) > 1 for path in slow), "nothing is clearly slower, so this test shows nothing"
    assert not slow & {path for path, order in looked if order}
    assert {order for _, order in looked} > {0}


@pytest.mark.parametrize(
    ("count", "tried", "idle", "is_behind"),
    [
        (8, {2: 1.03, 4: 1.02}, 0.1, True),  # layers took 0.09 s longer already, and idle seconds fall by 0.05
        (8, {2: 1.2, 4: 1.02}, 0.1, False),
        (8, {2: 1.03, 4: 1.02}, 0.0, False),  # nothing is known of what idles
        (2, {8: 1.03, 4: 1.02}, 0.1, True),
        (2, {8: 1.2, 4: 1.02}, 0.1, False),
        (8, {2: 1.02, 4: 1.03}, 0.0, True),
        (3, {2: 1.02, 4: 1.03}, 0.1, False),
        (8, {2: 1.03, 4: float("inf")}, 0.1, False),
    ],
)
def test_numbers_of_microbatches_are_left_out_that_gain_less_than_layers_lose(
    count: int, tried: dict[int, float], idle: float, is_behind: bool
) -> None:
    assert _lies_behind(count, tried, lambda _: idle) == is_behind


@pytest.mark.parametrize("tried", [{2: 1.02, 4: 1.03}, {2: 1.02, 4: float("inf")}, {2: 1.02, 4: 1e9}])
def test_schedules_are_not_listed_for_numbers_of_which_seconds_say_enough(tried: dict[int, float]) -> None:
    asked: list[int] = []
    _lies_behind(8, tried, lambda count: asked.append(count) or 0.1)
    assert not asked
