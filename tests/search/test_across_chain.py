"""The search across layers on made-up tables: brute force, bounds, and never slower with more memory."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search.chain.chain_dp import Chain, ChainLayer, Skip, path_costs
from autopar.search.chain.lagrangian import fastest_paths
from autopar.search.chain.limited_paths import limited_path


def make_chain(seed: int, num_layers: int, num_candidates: int, *, with_skip: bool = False) -> Chain:
    """A random chain with three boundary states, in which every candidate can be reached."""
    random = np.random.default_rng(seed)
    num_states = 3
    tables: list[ChainLayer] = []
    for _ in range(num_layers):
        memory = random.uniform(1.0, 10.0, num_candidates).round(1)
        tables.append(
            ChainLayer(
                (random.uniform(0.5, 3.0, num_candidates) + 5.0 / memory).round(2),
                memory * 1e9,
                random.choice([0.0, 0.5e9, 2e9], num_candidates),
                random.integers(0, num_states, num_candidates),
                random.integers(0, num_states, num_candidates),
            )
        )
    moves = tuple(random.uniform(0.0, 1.0, (num_states, num_states)).round(2) for _ in range(num_layers - 1))
    skips = (Skip(0, num_layers - 1, random.uniform(0.0, 1.0, (num_states, num_states)).round(2)),)
    return Chain(num_states, tuple(tables), moves, skips if with_skip else (), 0.25, 3e9)


def every_path(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and peak bytes of every path."""
    paths = np.array(list(itertools.product(*(range(len(table.time_s)) for table in chain.layers))))
    costs = path_costs(chain, paths)
    return costs[:, 0], costs[:, 1] + costs[:, 2]


def cost_by_hand(chain: Chain, path: tuple[int, ...]) -> tuple[float, float]:
    time, persistent, transient = chain.fixed_s, chain.fixed_bytes, 0.0
    for layer, index in enumerate(path):
        table = chain.layers[layer]
        time += table.time_s[index]
        persistent += table.persistent_bytes[index]
        transient = max(transient, table.transient_bytes[index])
        if layer:
            state = chain.layers[layer - 1].state_out[path[layer - 1]]
            time += chain.moves_s[layer - 1][state, table.state_in[index]]
    for skip in chain.skips:
        source = chain.layers[skip.producer].state_out[path[skip.producer]]
        time += skip.moves_s[source, chain.layers[skip.reader].state_in[path[skip.reader]]]
    return time, persistent + transient


@given(seed=st.integers(0, 10_000), with_skip=st.booleans())
@settings(max_examples=20, deadline=None)
def test_costs_of_paths_are_the_sums_that_the_docstring_states(seed: int, with_skip: bool) -> None:
    chain = make_chain(seed, 4, 3, with_skip=with_skip)
    paths = list(itertools.product(range(3), repeat=4))
    costs = path_costs(chain, np.array(paths))
    expected = np.array([cost_by_hand(chain, path) for path in paths])
    np.testing.assert_allclose(costs[:, 0], expected[:, 0], rtol=1e-12)
    np.testing.assert_allclose(costs[:, 1] + costs[:, 2], expected[:, 1], rtol=1e-12)


@given(seed=st.integers(0, 10_000), num_layers=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_without_a_limit_the_path_is_that_of_brute_force(seed: int, num_layers: int) -> None:
    chain = make_chain(seed, num_layers, 5)
    time, _ = every_path(chain)
    pool = fastest_paths(chain)
    assert pool.time_s[pool.best(np.inf)] == pytest.approx(time.min(), rel=1e-12)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_smallest_path_is_that_of_brute_force(seed: int) -> None:
    chain = make_chain(seed, 4, 5)
    _, peak = every_path(chain)
    pool = fastest_paths(chain)
    assert pool.peak_bytes[pool.smallest()] == pytest.approx(peak.min(), rel=1e-12)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_the_smallest_path_is_found_among_many_transients(seed: int) -> None:
    random = np.random.default_rng(seed)
    chain = make_chain(seed, 4, 6)
    layers = (dataclasses.replace(each, transient_bytes=random.uniform(0.0, 2e10, 6)) for each in chain.layers)
    chain = dataclasses.replace(chain, layers=tuple(layers))
    _, peak = every_path(chain)
    pool = fastest_paths(chain)
    assert pool.peak_bytes[pool.smallest()] <= peak.min() * 1.0011


@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 1.0), with_skip=st.booleans())
@settings(max_examples=80, deadline=None)
def test_within_a_limit_the_optimum_lies_between_the_bound_and_the_path(
    seed: int, share: float, with_skip: bool
) -> None:
    chain = make_chain(seed, 4, 5, with_skip=with_skip)
    time, peak = every_path(chain)
    limit = float(peak.min() + share * (peak.max() - peak.min()))
    optimum = time[peak <= limit].min()
    pool = fastest_paths(chain)
    found = pool.best(limit)
    assert found >= 0
    assert pool.peak_bytes[found] <= limit
    assert pool.lower_bound_s(limit) <= optimum * (1 + 1e-9)
    assert pool.time_s[found] >= optimum * (1 - 1e-9)


@given(seed=st.integers(0, 10_000), with_skip=st.booleans())
@settings(max_examples=40, deadline=None)
def test_more_memory_is_never_slower(seed: int, with_skip: bool) -> None:
    chain = make_chain(seed, 6, 6, with_skip=with_skip)
    pool = fastest_paths(chain)
    limits = np.linspace(min(pool.peak_bytes), max(pool.peak_bytes), 30)
    times = [pool.time_s[pool.best(limit)] for limit in limits]
    assert all(later <= earlier for earlier, later in itertools.pairwise(times))


@given(seed=st.integers(0, 10_000), share=st.floats(0.0, 0.9), has_fixed=st.booleans())
@settings(max_examples=60, deadline=None)
def test_labels_find_the_optimum_within_a_limit(seed: int, share: float, has_fixed: bool) -> None:
    """Bytes differ by no less than a part of the memory, and there are few transients, so that labels are exact."""
    chain = make_chain(seed, 3, 7)
    chain = chain if has_fixed else dataclasses.replace(chain, fixed_bytes=0.0)
    time, peak = every_path(chain)
    limit = float(peak.min() + share * (peak.max() - peak.min())) + 1.0
    path = limited_path(chain, limit)
    assert path is not None
    seconds, num_bytes = cost_by_hand(chain, tuple(path.tolist()))
    assert num_bytes <= limit
    assert seconds == pytest.approx(time[peak <= limit].min(), rel=1e-12)
    assert limited_path(chain, float(peak.min()) - 1.0) is None


def test_labels_are_nearer_to_the_optimum_than_the_hull() -> None:
    """Of short chains, as the device groups of pipelines have them; the hull's paths are 1 to 3 % slower."""
    gaps: list[tuple[float, float]] = []
    for seed in range(40):
        chain = make_chain(seed, 5, 5)
        time, peak = every_path(chain)
        limit = float(np.median(peak))
        path, pool = limited_path(chain, limit), fastest_paths(chain)
        assert path is not None
        optimum_s = time[peak <= limit].min()
        seconds, _ = cost_by_hand(chain, tuple(path.tolist()))
        gaps.append((seconds / optimum_s - 1, pool.time_s[pool.best(limit)] / optimum_s - 1))
    of_labels, of_hulls = np.mean(gaps, axis=0)
    assert of_labels < 0.002
    assert of_labels < of_hulls


def test_paths_are_near_the_optimum_on_average() -> None:
    """The pool holds hull points and single switches: over many chains a few per cent from the optimum."""
    gaps: list[float] = []
    for seed in range(40):
        chain = make_chain(seed, 5, 5)
        time, peak = every_path(chain)
        limit = float(np.median(peak))
        pool = fastest_paths(chain)
        gaps.append(pool.time_s[pool.best(limit)] / time[peak <= limit].min() - 1)
    assert np.mean(gaps) < 0.03


def test_nothing_fits_below_the_smallest() -> None:
    pool = fastest_paths(make_chain(1, 3, 4))
    assert pool.best(min(pool.peak_bytes) - 1) == -1


def test_the_bound_holds_where_memory_is_dear() -> None:
    chain = make_chain(247, 4, 5)  # at 1 s per byte, values of 1e10 s lose the microseconds
    time, peak = every_path(chain)
    limit = float(peak.min())
    assert fastest_paths(chain).lower_bound_s(limit) <= time[peak <= limit].min()
