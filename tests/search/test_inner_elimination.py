"""Elimination against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.layer.variable_elimination import Table, minimize


def brute_force(sizes: list[int], tables: list[Table], keep: list[int]) -> np.ndarray:
    best = np.full([sizes[v] for v in keep], np.inf)
    for states in itertools.product(*map(range, sizes)):
        cost = sum(float(costs[tuple(states[v] for v in scope)]) for scope, costs in tables)
        where = tuple(states[v] for v in keep)
        best[where] = min(best[where], cost)
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Table], list[int]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    levels = draw(st.sampled_from([3, 1000]))  # few levels: many ties
    tables: list[Table] = []
    for _ in range(draw(st.integers(0, 9))):
        scope = tuple(draw(st.permutations(range(len(sizes))))[: draw(st.integers(1, 3))])
        costs = rng.integers(0, levels, [sizes[v] for v in scope]).astype(float)
        if draw(st.booleans()):
            costs[rng.random(costs.shape) < 0.15] = np.inf
        tables.append((scope, costs))
    keep = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=2, unique=True))
    return sizes, tables, keep


def check(sizes: list[int], tables: list[Table], keep: list[int]) -> None:
    found = minimize(sizes, tables, keep)
    expected = brute_force(sizes, tables, keep)
    assert found.exact
    np.testing.assert_array_equal(found.values, expected)
    for where in np.ndindex(*expected.shape):
        states = found.assignments[where]
        assert tuple(states[v] for v in keep) == where
        cost = sum(float(costs[tuple(states[v] for v in scope)]) for scope, costs in tables)
        assert cost == expected[where]


@given(problems())
@settings(max_examples=150, deadline=None)
def test_elimination_equals_brute_force(problem: tuple[list[int], list[Table], list[int]]) -> None:
    check(*problem)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_dropping_dominated_states_keeps_the_optimum(
    problem: tuple[list[int], list[Table], list[int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.search.layer.variable_elimination._DOMINANCE_ENTRIES", 1)
        check(*problem)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_beyond_the_limit_the_bound_and_the_value_enclose_the_optimum(
    problem: tuple[list[int], list[Table], list[int]],
) -> None:
    sizes, tables, keep = problem
    found = minimize(sizes, tables, keep, max_entries=8)
    expected = brute_force(sizes, tables, keep)
    assert (found.lower_bounds <= expected).all()
    assert (found.values >= expected).all()
    if found.exact:
        np.testing.assert_array_equal(found.values, expected)


def test_a_dense_problem_exceeds_the_limit_and_says_so() -> None:
    rng = np.random.default_rng(0)
    tables = [((a, b), rng.random((6, 6))) for a, b in itertools.combinations(range(6), 2)]
    found = minimize([6] * 6, tables, max_entries=300)
    assert not found.exact
    assert found.lower_bounds < found.values
