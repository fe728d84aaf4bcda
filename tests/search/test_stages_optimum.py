"""The search over stages against brute force, and what its numbers must obey."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.schedules import Shape, schedule_names, schedule_problem
from autopar.schedules.action_lists import (
    ScheduleActions,
    StageCost,
    count_flights,
    schedule_s,
    seconds_of,
    simulate_schedule,
)
from autopar.schedules.critical_paths import schedule_paths
from autopar.schedules.packing import Packing, pack
from autopar.search.chain.cost_tables import CostTables, LayerCosts, Transfer, path_host_bytes, path_stages
from autopar.search.pipeline.pipeline_bounds import least_step_s
from autopar.search.pipeline.relaxed_pipelines import _Problem, relaxed_bounds
from autopar.step.costs.stage_costs import pipeline_step_s
from tests.search.stage_problems import every_pipeline, make_tables, search_shapes

CASES = [
    (Shape("gpipe", 2, 2, 4), 6, 2),
    (Shape("1f1b", 2, 2, 4), 5, 3),
    (Shape("1f1b", 3, 3, 6), 6, 2),
    (Shape("interleaved_1f1b", 2, 4, 4), 6, 2),
    (Shape("interleaved_zero_bubble", 2, 4, 4), 6, 2),
    (Shape("zbv", 2, 4, 4), 6, 2),
    pytest.param(Shape("gpipe", 4, 4, 4), 8, 2, marks=pytest.mark.slow),
    pytest.param(Shape("1f1b", 4, 4, 8), 8, 2, marks=pytest.mark.slow),
    pytest.param(Shape("zbv", 2, 4, 4), 8, 2, marks=pytest.mark.slow),
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("shape", "num_layers", "num_candidates"), CASES, ids=str)
def test_small_problems_are_solved_nearly_as_by_brute_force(
    shape: Shape, num_layers: int, num_candidates: int, seed: int
) -> None:
    tables = make_tables(seed, num_layers, num_candidates, shape.num_microbatches, longest_begin_s=8.0 * seed)
    every = list(every_pipeline(tables, shape))
    best_s, smallest = min(seconds for seconds, _ in every), min(peak for _, peak in every)
    found = search_shapes(tables, shape)
    assert found.best is not None
    assert best_s * (1 - 1e-12) <= found.best.step_s <= 1.02 * best_s
    assert found.lower_bound_s <= best_s * (1 + 1e-12)
    nothing = search_shapes(replace(tables, limit_bytes=smallest * 0.99), shape)
    assert nothing.best is None
    assert nothing.smallest is not None


def test_demanded_cuts_are_kept() -> None:
    tables = make_tables(2, 6, 2, 4)
    found = search_shapes(tables, Shape("1f1b", 2, 2, 4), cuts=(1,))
    assert found.best is not None
    assert found.best.cuts.bounds == (0, 1, 6)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_pipelines_offload_fits_on_hosts(seed: int) -> None:
    tables, shape = make_tables(seed, 6, 2, 4), Shape("1f1b", 2, 2, 4)
    layers = [
        replace(
            layer,
            saved_bytes=layer.saved_bytes * (0, 1),
            forward_s=layer.forward_s.max() * np.array([1, 1.5]),
            host_bytes=layer.saved_bytes * (1, 0),
        )
        for layer in tables.layers
    ]
    tables = replace(tables, layers=tuple(layers))
    free = search_shapes(tables, shape)
    assert free.best is not None
    limit = free.best.host_bytes * 0.6
    tables = replace(tables, host_limit_bytes=limit)
    actions = schedule_actions(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
    best_s = np.inf
    for cut, path in itertools.product(range(1, 6), itertools.product(range(2), repeat=6)):
        bounds = (0, cut, 6)
        if path_host_bytes(tables, shape, bounds, path, actions) <= limit:
            stages = path_stages(tables, shape, bounds, path, actions)
            best_s = min(best_s, pipeline_step_s(shape, actions, stages))
    found = search_shapes(tables, shape)
    assert found.best is not None
    assert found.best.host_bytes <= limit
    assert best_s * (1 - 1e-12) <= found.best.step_s <= 1.08 * best_s
    # Little memory on devices, so that all layers must offload, and no room for that on hosts.
    smallest = min(each.peak_bytes for each in search_shapes(replace(tables, limit_bytes=0.0), shape).candidates)
    nothing = search_shapes(replace(tables, limit_bytes=smallest, host_limit_bytes=0.0), shape)
    assert nothing.best is None
    assert nothing.short_of_host is not None


@pytest.mark.parametrize(("seed", "best_known_s"), [(2, 68.6), (3, 67.2), (7, 60.0)])
def test_stages_that_turn_out_too_large_are_cut_otherwise(seed: int, best_known_s: float) -> None:
    """Equal layers in half of the memory that they would use: none of the cuts that seem best at first fits."""
    shape = Shape("1f1b", 4, 4, 8)
    tables = replace(make_tables(seed, 10, 3, shape.num_microbatches), skips=(), tied=())
    tables = replace(tables, layers=tables.layers[:1] * 10)
    free = search_shapes(tables, shape).best
    smallest = search_shapes(replace(tables, limit_bytes=0.0), shape).smallest
    assert free is not None
    assert smallest is not None
    found = search_shapes(replace(tables, limit_bytes=(free.peak_bytes + smallest.peak_bytes) / 2), shape)
    assert found.best is not None
    assert found.best.step_s <= best_known_s


def test_device_groups_are_made_smaller_by_what_they_are_over_the_limit() -> None:
    """As where the walk through a step finds more than the search counts."""
    shape = Shape("1f1b", 2, 2, 4)
    best = search_shapes(make_tables(1, 6, 3, 4), shape).best
    assert best is not None
    first, last = (stage.peak_memory_bytes for stage in best.stages)
    smaller = best.shrunk({0: 0.1 * first}, schedule_actions)
    assert smaller.cuts == best.cuts
    assert smaller.stages[0].peak_memory_bytes <= 0.9 * first
    assert smaller.stages[1].peak_memory_bytes == pytest.approx(last, rel=0.1)
    assert smaller.step_s > best.step_s


def test_uneven_costs_give_uneven_cuts() -> None:
    tables = make_tables(3, 8, 1, 16)
    heavy = tables.layers[7]
    layers = (*tables.layers[:7], replace(heavy, forward_s=heavy.forward_s * 12, backward_s=heavy.backward_s * 12))
    found = search_shapes(replace(tables, layers=layers), Shape("1f1b", 2, 2, 16))
    assert found.best is not None
    assert found.best.cuts.bounds == (0, 7, 8)


@pytest.mark.parametrize(("seed", "num_layers"), [(1, 15), (1, 18), (2, 18), (3, 18)])
def test_equal_layers_are_divided_among_the_stages_of_a_v_as_is_best(seed: int, num_layers: int) -> None:
    """Which stages have one layer more matters by up to 23 %; there are more than `_MOST_CUTS` ways to cut."""
    shape = Shape("zbv", 4, 8, 16)
    tables = make_tables(seed, num_layers, 1, shape.num_microbatches)
    tables = replace(
        tables, layers=tables.layers[:1] * num_layers, transfers=(None,) * (num_layers - 1), skips=(), tied=()
    )
    actions = schedule_actions(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
    usual, more = divmod(num_layers, shape.num_stages)
    best_s = np.inf
    for longer in itertools.combinations(range(shape.num_stages), more):
        widths = [usual + (stage in longer) for stage in range(shape.num_stages)]
        stages = path_stages(tables, shape, (0, *np.cumsum(widths).tolist()), (0,) * num_layers, actions)
        best_s = min(best_s, pipeline_step_s(shape, actions, stages))
    found = search_shapes(tables, shape).best
    assert found is not None
    assert found.step_s <= 1.01 * best_s


def test_microbatches_in_flight_move_layers_to_later_stages() -> None:
    """Under 1F1B the first stage holds most microbatches: with less memory it has fewer layers."""
    tables = replace(make_tables(4, 8, 1, 8), skips=(), tied=())
    layer = replace(tables.layers[0], saved_bytes=np.array([4.0]), static_bytes=np.array([1.0]))
    tables = replace(tables, layers=(layer,) * 8)
    shape = Shape("1f1b", 4, 4, 8)
    firsts: list[int] = []
    for limit in (np.inf, 28.0):
        found = search_shapes(replace(tables, limit_bytes=limit), shape)
        assert found.best is not None
        firsts.append(found.best.cuts.bounds[1])
    assert firsts == [2, 1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", schedule_names())
def test_closed_forms_agree_with_the_action_lists(schedule: str) -> None:
    for groups, rounds, count in itertools.product((2, 3, 4, 8), (1, 2, 3), (1, 2, 4, 8, 12, 32)):
        if not schedule_problem(schedule, groups, rounds * groups, count):
            shape = Shape(schedule, groups, rounds * groups, count)
            actions = schedule_actions(schedule, groups, rounds * groups, count)
            counted = count_flights(actions, shape.num_stages)
            assert all(real <= said for real, said in zip(counted, shape.in_flight, strict=True)), shape
            assert count % groups or counted == shape.in_flight, shape
            flights = zip(shape.flights, count_splits(actions, shape.num_stages), counted, strict=True)
            assert all(said.split >= real and said.in_flight >= whole for said, real, whole in flights), shape


def count_splits(actions: ScheduleActions, num_stages: int) -> list[int]:
    """Per stage, the most microbatches between I and W."""
    now, most = [0] * num_stages, [0] * num_stages
    for stage, kind, _ in itertools.chain(*actions):
        now[stage] += {"I": 1, "W": -1}.get(kind, 0)
        most[stage] = max(most[stage], now[stage])
    return most


@pytest.mark.parametrize(
    "shape",
    [
        Shape("gpipe", 4, 4, 4), Shape("1f1b", 4, 4, 8), Shape("zbv", 2, 4, 4), Shape("interleaved_1f1b", 2, 4, 4),
        Shape("interleaved_zero_bubble", 2, 4, 4),
    ],
    ids=str,
)  # fmt: skip
def test_no_pipeline_beats_its_bound(shape: Shape) -> None:
    tables = make_tables(6, 6, 1, shape.num_microbatches)
    forward_s = np.array([float(t.forward_s[0]) for t in tables.layers]) * shape.num_microbatches
    total_s = forward_s + np.array([float(t.backward_s[0]) for t in tables.layers]) * shape.num_microbatches
    bound_s = least_step_s(shape, forward_s, total_s)
    assert bound_s > float(total_s.sum()) / shape.num_groups  # layers that can't be divided count
    assert all(seconds >= bound_s for seconds, _ in every_pipeline(tables, shape))


@pytest.mark.parametrize("shape", [Shape("zbv", 4, 8, 8), Shape("interleaved_zero_bubble", 2, 4, 4)], ids=str)
def test_a_schedule_of_split_backwards_waits_for_whole_ones_if_layers_have_no_others(shape: Shape) -> None:
    tables = make_tables(6, shape.num_stages + 2, 1, shape.num_microbatches)
    tables = replace(tables, layers=tuple(replace(t, weight_s=0 * t.weight_s) for t in tables.layers))
    forward_s = np.array([float(t.forward_s[0]) for t in tables.layers]) * shape.num_microbatches
    total_s = forward_s + np.array([float(t.backward_s[0]) for t in tables.layers]) * shape.num_microbatches
    bound_s = least_step_s(shape, forward_s, total_s, splits=False)
    assert bound_s > least_step_s(shape, forward_s, total_s)
    assert all(seconds >= bound_s for seconds, _ in every_pipeline(tables, shape))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("shape", "num_layers", "num_candidates"), CASES, ids=str)
def test_no_pipeline_that_fits_is_faster_than_the_relaxed_one(
    shape: Shape, num_layers: int, num_candidates: int
) -> None:
    tables = make_tables(7, num_layers, num_candidates, shape.num_microbatches, longest_begin_s=3.0)
    every = list(every_pipeline(tables, shape))
    peaks = sorted(peak for _, peak in every)
    actions = schedule_actions(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
    for limit_bytes in (np.inf, peaks[len(peaks) // 3], peaks[len(peaks) // 20], peaks[0]):
        best_s = min(seconds for seconds, peak in every if peak <= limit_bytes)
        own = replace(tables, limit_bytes=limit_bytes)
        for hoped in (0.5, 1.0, 3.0):
            assert max(relaxed_bounds(own, shape, actions, hoped * best_s)) <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("shape", [Shape("interleaved_1f1b", 4, 8, 8), Shape("interleaved_1f1b", 4, 16, 8)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_limit_makes_a_bound_no_lower(shape: Shape, seed: int) -> None:
    """Up to what a search for prices of memory leaves open."""
    tables = make_tables(seed, 16, 6, shape.num_microbatches)
    actions = schedule_actions(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
    endless_s = max(relaxed_bounds(tables, shape, actions, 1e9))
    least_bytes = sum(float(each.static_bytes.min() + 4 * each.saved_bytes.min()) for each in tables.layers) / 4
    limited_s = max(relaxed_bounds(replace(tables, limit_bytes=3 * least_bytes), shape, actions, 2 * endless_s))
    tight_s = max(relaxed_bounds(replace(tables, limit_bytes=2 * least_bytes), shape, actions, 2 * endless_s))
    assert 0.99 * endless_s <= limited_s <= 1.01 * tight_s
    assert tight_s >= 1.05 * endless_s


@pytest.mark.parametrize("num_microbatches", [8, 32])
def test_bounds_know_that_layers_are_whole_and_groups_have_limits(num_microbatches: int) -> None:
    """Of ten equal layers one of eight device groups has two; shared out evenly they would take up to 31 % less."""
    shape = Shape("1f1b", 8, 8, num_microbatches)
    one = make_tables(3, 10, 4, num_microbatches).layers[0]
    tables = CostTables(num_microbatches, 2, (one,) * 10, (None,) * 9)
    free = search_shapes(tables, shape).best
    assert free is not None
    before_s = 0.0
    for share in (1.0, 0.8, 0.6, 0.5):
        own = replace(tables, limit_bytes=share * free.peak_bytes)
        found = search_shapes(own, shape).best
        assert found is not None
        bound_s = max(relaxed_bounds(own, shape, shape.actions(schedule_actions), 2 * found.step_s))
        assert max(before_s, 0.89 * found.step_s) < bound_s <= found.step_s
        before_s = bound_s


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if name != "dualpipev"])
def test_of_equal_layers_the_relaxed_pipeline_is_nearly_the_best(schedule: str) -> None:
    """As many layers as stages can share evenly, which need no more than the fill and drain of the schedule."""
    stages = 4 if schedule in ("gpipe", "1f1b") else 8
    shape = Shape(schedule, 4, stages, 8)
    one = make_tables(3, 1, 1, 8).layers[0]
    layer = replace(one, state_in=one.state_in * 0, state_out=one.state_out * 0, weight_s=one.backward_s / 2)
    tables = CostTables(8, 1, (layer,) * 16, (None,) * 15)
    actions = schedule_actions(schedule, 4, stages, 8)
    found = search_shapes(tables, shape)
    assert found.best is not None
    found.raise_bounds(found.best_s)
    assert found.lower_bound_s <= found.best_s * (1 + 1e-9)  # they may be equal, up to rounding
    assert found.best_s <= 1.08 * found.lower_bound_s
    assert max(relaxed_bounds(tables, shape, actions, found.best_s)) <= found.best_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("shape", "num_layers", "slack"),
    [
        # No chain was sought in which backwards are whole: 16 %.
        (Shape("zbv", 8, 16, 16), 32, 1.03),
        # With the few chains that are sought at first: 2.1 %.
        (Shape("interleaved_1f1b", 4, 32, 8), 64, 1.018),
    ],
    ids=str,
)
def test_bounds_of_compiled_layers_are_near_what_is_found(shape: Shape, num_layers: int, slack: float) -> None:
    """Their backwards are not split, also by schedules that do so."""
    one = make_tables(3, 1, 1, 8).layers[0]
    layer = replace(one, state_in=one.state_in * 0, state_out=one.state_out * 0, weight_s=one.backward_s * 0)
    found = search_shapes(
        CostTables(shape.num_microbatches, 1, (layer,) * num_layers, (None,) * (num_layers - 1)), shape
    )
    found.raise_bounds(found.best_s)
    assert found.lower_bound_s <= found.best_s <= slack * found.lower_bound_s


def test_no_chain_is_longer_than_the_step() -> None:
    random = np.random.default_rng(0)
    for shape in (Shape("1f1b", 4, 4, 8), Shape("interleaved_1f1b", 4, 8, 8), Shape("zbv", 4, 8, 8)):
        actions = schedule_actions(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
        chains = schedule_paths(actions, shape.num_stages)
        more = schedule_paths(actions, shape.num_stages, splits=False, is_thorough=True)
        for _ in range(5):
            costs = random.uniform(0.5, 1.5, (shape.num_stages, 5))
            costs[:, 2] *= costs[:, 1] / 2
            stages = tuple(StageCost(*each) for each in costs.tolist())
            chains_s = np.einsum("psk,sk->p", chains.counts, [seconds_of(stage) for stage in stages])
            step_s = schedule_s(actions, stages)
            assert chains_s.max() <= step_s * (1 + 1e-12)
            assert chains_s.max() >= 0.7 * step_s
            assert np.einsum("psk,sk->p", more.counts, [seconds_of(each) for each in stages]).max() <= step_s * (
                1 + 1e-12
            )
            # Groups that gather their parameters before their first action, the last one for longest.
            begins_s = np.array([0.0, 3.0, 0.0, 40.0])
            later_s = simulate_schedule(actions, stages, begins_s=begins_s.tolist()).step_s
            assert (chains_s + begins_s[chains.begins]).max() <= later_s * (1 + 1e-12)
            assert (chains_s + begins_s[chains.begins]).max() >= 0.85 * later_s > step_s


@pytest.mark.parametrize("limit_bytes", [np.inf, 90.0])
def test_what_a_bound_consists_of_adds_up(limit_bytes: float) -> None:
    """Multipliers are improved by the seconds of chains and the excess of groups on the path that attains a bound."""
    shape = Shape("interleaved_1f1b", 2, 4, 4)
    tables = make_tables(5, 7, 3, shape.num_microbatches, limit_bytes=limit_bytes)
    begin_s = np.array([0.5, 0.0, 1.0])
    tables = replace(tables, layers=tuple(replace(each, begin_s=begin_s) for each in tables.layers))
    problem = _Problem.of(tables, shape, shape.actions(schedule_actions), 4, ())
    random = np.random.default_rng(0)
    for _ in range(5):
        shares, memory_s = random.dirichlet(np.ones(len(problem.counts))), random.uniform(0, 5, len(problem.in_flight))
        memory_s *= np.isfinite(limit_bytes)
        bound_s, chains_s, excess = problem.value((shares, memory_s))
        own_s = shares @ chains_s + (memory_s @ excess if len(excess) else 0.0)
        assert own_s + tables.broadcast_s == pytest.approx(bound_s, rel=1e-9)


@pytest.mark.parametrize(("seed", "num_microbatches"), [(14, 4), (2, 8)])
def test_a_pipeline_of_equal_layers_is_found_with_equal_stages(seed: int, num_microbatches: int) -> None:
    """A group's candidates are chosen by their sum, for which a mix is faster; but stages wait for each other."""
    shape = Shape("interleaved_1f1b", 4, 16, num_microbatches)
    random, nothing, state = np.random.default_rng(seed), np.zeros(4), np.zeros(4, dtype=np.intp)
    saved_bytes = np.sort(random.uniform(0.2, 6, 4))[::-1]
    forward_s = np.sort(random.uniform(1.0, 1.6, 4))
    backward_s = np.sort(random.uniform(2, 3, 4))[random.permutation(4)]
    layer = replace(
        make_tables(seed, 1, 4, num_microbatches).layers[0], forward_s=forward_s, backward_s=backward_s,
        saved_bytes=saved_bytes, weight_s=nothing, split_bytes=nothing, transient_bytes=nothing + 1, state_in=state,
        state_out=state,
    )  # fmt: skip
    tables, bounds = CostTables(num_microbatches, 1, (layer,) * 16, (None,) * 15), tuple(range(17))
    actions = shape.actions(schedule_actions)
    equal = [path_stages(tables, shape, bounds, (row,) * 16, actions) for row in range(4)]
    peaks = [max(stage.peak_memory_bytes for stage in stages) for stages in equal]
    limit_bytes = 1.05 * sorted(peaks)[1]
    found = search_shapes(replace(tables, limit_bytes=limit_bytes), shape).best
    assert found is not None
    fastest_s = min(
        pipeline_step_s(shape, actions, stages)
        for stages, peak in zip(equal, peaks, strict=True)
        if peak <= limit_bytes
    )
    assert found.step_s <= fastest_s * (1 + 1e-9)


def bare_layer(forward_s: tuple[float, ...], state_in: int, *states_out: int, begin_s: float = 0.0) -> LayerCosts:
    """Candidates whose backward takes twice as long, and that take no memory; the first begins with something."""
    count = len(forward_s)
    one, seconds, nothing = make_tables(0, 1, count, 8).layers[0], np.array(forward_s), np.zeros(count)
    return replace(
        one, forward_s=seconds, backward_s=2 * seconds, weight_s=nothing, step_s=nothing, static_bytes=nothing,
        saved_bytes=nothing, transient_bytes=nothing, split_bytes=nothing, leave_s=nothing, return_s=nothing,
        begin_s=begin_s * np.eye(count)[0], state_in=np.full(count, state_in), state_out=np.array(states_out),
    )  # fmt: skip


def test_what_two_groups_share_is_done_by_the_one_that_has_time_left() -> None:
    """By the sum of seconds, the last layer of the first group would bring its result into the form of the next."""
    usual, either = bare_layer((1.0,), 0, 0), bare_layer((1.0, 1.2), 0, 0, 1)
    moved_s = np.array([[0.0, 0.3], [0.3, 0.0]])
    layers, move = (usual, usual, either, bare_layer((0.3,), 1, 1)), Transfer(2, 3, moved_s, 2 * moved_s)
    tables, shape = CostTables(8, 2, layers, (None, None, move)), Shape("1f1b", 2, 2, 8)
    actions = shape.actions(schedule_actions)
    moving_s, not_moving_s = (
        pipeline_step_s(shape, actions, path_stages(tables, shape, (0, 3, 4), (0, 0, row, 0))) for row in range(2)
    )
    assert moving_s < not_moving_s
    found = search_shapes(tables, shape, cuts=(3,)).best
    assert found is not None
    assert found.step_s == pytest.approx(moving_s)


@pytest.mark.parametrize(
    ("shape", "seed", "num_layers", "best_known_s"),
    [
        (Shape("zbv", 4, 8, 8), 5, 14, 104.71), (Shape("1f1b", 4, 4, 8), 0, 12, 81.59),
        (Shape("interleaved_1f1b", 4, 8, 8), 5, 16, 120.81), (Shape("interleaved_1f1b", 4, 16, 8), 3, 16, 105.2),
    ],
    ids=str,
)  # fmt: skip
def test_groups_use_their_memory_and_the_longest_chain_decides(
    shape: Shape, seed: int, num_layers: int, best_known_s: float
) -> None:
    """By the sum of each group's seconds, and if all stages of a group held their most microbatches at the same time,
    these take 2 to 8 % longer.
    """
    tables = make_tables(seed, num_layers, 6, shape.num_microbatches)
    first, usual, *_, last = tables.layers
    tables = replace(tables, layers=(first, *(usual,) * (num_layers - 2), last), skips=(), tied=())
    free = search_shapes(tables, shape).best
    assert free is not None
    share = 0.7 if shape.num_stages < 16 else 0.8
    found = search_shapes(replace(tables, limit_bytes=share * free.peak_bytes), shape).best
    assert found is not None
    assert found.step_s <= best_known_s


@pytest.mark.parametrize(
    ("shape", "num_layers", "best_known_s"),
    [(Shape("1f1b", 2, 2, 8), 24, 337.1), (Shape("1f1b", 2, 2, 4), 40, 276.5)],
    ids=str,
)
def test_groups_of_many_layers_find_what_fits(shape: Shape, num_layers: int, best_known_s: float) -> None:
    tables = make_tables(0, num_layers, 6, shape.num_microbatches)
    free = search_shapes(tables, shape).best
    assert free is not None
    found = search_shapes(replace(tables, limit_bytes=0.6 * free.peak_bytes), shape).best
    assert found is not None
    assert found.step_s <= best_known_s


def test_what_groups_begin_with_overlaps_with_the_wait_for_the_first_microbatch() -> None:
    """To begin with something costs the second group nothing, though it is more than what it saves."""
    layers = bare_layer((1.2,), 0, 0), bare_layer((1.12, 1.2), 0, 0, 0, begin_s=1.1)
    tables, shape = CostTables(4, 1, layers, (None,)), Shape("1f1b", 2, 2, 4)
    found = search_shapes(tables, shape).best
    assert found is not None
    assert found.begins_s == (0.0, 1.1)
    assert found.step_s == min(seconds for seconds, _ in every_pipeline(tables, shape))


def test_packing_finds_the_largest_sum_and_what_its_limits_are_worth() -> None:
    random = np.random.default_rng(1)
    for rows, columns in ((1, 1), (3, 5), (20, 12), (40, 60)):
        takes, limits = random.uniform(0.1, 1.0, (rows, columns)), random.uniform(1.0, 2.0, rows)
        amounts, gains = pack(takes, limits)
        assert (takes @ amounts <= limits * (1 + 1e-9)).all()
        assert (gains @ takes >= 1 - 1e-9).all()  # so no sum is larger than what the limits are worth
        assert amounts.sum() == pytest.approx(gains @ limits)


def test_a_packing_with_other_limits_is_what_it_is_from_the_beginning() -> None:
    random = np.random.default_rng(2)
    for rows, columns in ((1, 1), (3, 5), (20, 12), (40, 60)):
        takes, limits = random.uniform(0.1, 1.0, (rows, columns)), random.uniform(1.0, 2.0, rows)
        packing = Packing(takes, limits)
        packing.solve()
        for _ in range(6):
            takes, limits = np.vstack([takes, random.uniform(0.1, 1.0, columns)]), np.append(limits, 1.3)
            packing.add_limit(takes[-1], limits[-1])
            one_more = packing.solve()[0].sum()
            assert one_more == pytest.approx(pack(takes, limits)[0].sum())
            limits = limits * random.uniform(0.7, 1.4, len(limits))
            packing.change_limits(limits)
            amounts, gains = packing.solve()
            assert amounts.sum() == pytest.approx(pack(takes, limits)[0].sum())
            assert (takes @ amounts <= limits * (1 + 1e-9)).all()
            assert (gains @ takes >= 1 - 1e-9).all()
            assert amounts.sum() == pytest.approx(gains @ limits)
