"""The search over stages against brute force, and what its numbers must obey."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.lower.run.schedules import schedule_actions
from autopar.schedule import SCHEDULES, Shape, count_flights, schedule_problem
from autopar.search.stages.bounds import least_step_s
from autopar.search.stages.estimates import estimate_flights
from autopar.search.stages.problem import StageProblem
from tests.search.stage_problems import every_pipeline, make_problem, search_shapes

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


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("shape", "num_layers", "num_candidates"), CASES, ids=str)
def test_small_problems_are_solved_as_by_brute_force(
    shape: Shape, num_layers: int, num_candidates: int, seed: int
) -> None:
    problem = make_problem(seed, num_layers, num_candidates, shape.num_microbatches)
    every = list(every_pipeline(problem, shape))
    peaks = sorted(peak for _, peak in every)
    for limit in (np.inf, peaks[len(peaks) // 20], peaks[0] * (1 + 1e-12), peaks[0] * 0.99):
        best_s = min((seconds for seconds, peak in every if peak <= limit), default=None)
        found = search_shapes(replace(problem, limit_bytes=float(limit)), shape)
        if best_s is None:
            assert found.best is None
            assert found.smallest is not None
        else:
            assert found.best is not None
            assert found.best.step_s == pytest.approx(best_s, rel=1e-12)
            assert found.best.peak_bytes <= limit
            assert found.lower_s <= best_s * (1 + 1e-12)


@pytest.mark.slow
def test_the_best_of_all_shapes_and_microbatches_is_found() -> None:
    whole = make_problem(5, 6, 2, 1)
    best_s, found_s = np.inf, np.inf
    for groups, count in itertools.product((2, 3), (2, 4)):
        problem = per_microbatch(whole, groups, count)
        shapes = [
            Shape(schedule, groups, rounds * groups, count)
            for schedule, rounds in itertools.product(SCHEDULES, (1, 2))
            if not schedule_problem(schedule, groups, rounds * groups, count)
        ]
        best_s = min(best_s, *(seconds for shape in shapes for seconds, _ in every_pipeline(problem, shape)))
        found = search_shapes(problem, *shapes)
        assert found.best is not None
        found_s = min(found_s, found.best.step_s)
    assert found_s == pytest.approx(best_s, rel=1e-12)


def per_microbatch(whole: StageProblem, groups: int, count: int) -> StageProblem:
    """The problem in so many microbatches on so many groups: more of each takes longer, as there are fewer devices."""
    share = groups / count
    tables = tuple(
        replace(
            t, forward_s=t.forward_s * share + 0.01, backward_s=t.backward_s * share + 0.02, weight_s=t.weight_s * share
        )
        for t in whole.tables
    )
    return replace(whole, num_microbatches=count, tables=tables)


def test_demanded_cuts_are_kept() -> None:
    problem = make_problem(2, 6, 2, 4)
    found = search_shapes(problem, Shape("1f1b", 2, 2, 4), cuts=(1,))
    assert found.best is not None
    assert found.best.bounds == (0, 1, 6)


def test_uneven_costs_give_uneven_cuts() -> None:
    problem = make_problem(3, 8, 1, 16)
    heavy = problem.tables[7]
    tables = (*problem.tables[:7], replace(heavy, forward_s=heavy.forward_s * 12, backward_s=heavy.backward_s * 12))
    found = search_shapes(replace(problem, tables=tables), Shape("1f1b", 2, 2, 16))
    assert found.best is not None
    assert found.best.bounds == (0, 7, 8)


def test_microbatches_in_flight_move_layers_to_later_stages() -> None:
    """Under 1F1B the first stage holds most microbatches: with less memory it has fewer layers."""
    problem = replace(make_problem(4, 8, 1, 8), skips=(), ties=())
    table = replace(problem.tables[0], saved_bytes=np.array([4.0]), static_bytes=np.array([1.0]))
    problem = replace(problem, tables=(table,) * 8)
    shape = Shape("1f1b", 4, 4, 8)
    firsts: list[int] = []
    for limit in (np.inf, 28.0):
        found = search_shapes(replace(problem, limit_bytes=limit), shape)
        assert found.best is not None
        firsts.append(found.best.bounds[1])
    assert firsts == [2, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_closed_forms_agree_with_the_action_lists(schedule: str) -> None:
    for groups, rounds, count in itertools.product((2, 3, 4, 8), (1, 2, 3), (1, 2, 4, 8, 12, 32)):
        if not schedule_problem(schedule, groups, rounds * groups, count):
            shape = Shape(schedule, groups, rounds * groups, count)
            actions = schedule_actions(schedule, groups, rounds * groups, count)
            counted = count_flights(actions, shape.num_stages)
            assert all(real <= said for real, said in zip(counted, estimate_flights(shape), strict=True)), shape
            assert count % groups or counted == estimate_flights(shape), shape


@pytest.mark.parametrize(
    "shape",
    [
        Shape("gpipe", 4, 4, 4), Shape("1f1b", 4, 4, 8), Shape("zbv", 2, 4, 4), Shape("interleaved_1f1b", 2, 4, 4),
        Shape("interleaved_zero_bubble", 2, 4, 4),
    ],
    ids=str,
)  # fmt: skip
def test_no_pipeline_beats_its_bound(shape: Shape) -> None:
    problem = make_problem(6, 6, 1, shape.num_microbatches)
    forward_s = np.array([float(t.forward_s[0]) for t in problem.tables]) * shape.num_microbatches
    total_s = forward_s + np.array([float(t.backward_s[0]) for t in problem.tables]) * shape.num_microbatches
    bound_s = least_step_s(shape, forward_s, total_s)
    assert bound_s > float(total_s.sum()) / shape.num_groups  # layers that can't be divided count
    assert all(seconds >= bound_s for seconds, _ in every_pipeline(problem, shape))
