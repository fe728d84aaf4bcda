"""`reshard` computes what it says: every pair of layouts is run on numpy arrays, forward and backward."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Layout, format_layout, reshard, shard
from tests.vocabulary.simulated_reshard import gradient_layout, join, run_backward, run_forward, scatter

PLACEMENTS = (REPLICATE, PARTIAL, BROADCAST, shard(0), shard(1))
COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
R, P, B = REPLICATE, PARTIAL, BROADCAST
S0, S1 = shard(0), shard(1)


def check_reshard(src: Layout, dst: Layout, mesh: tuple[int, ...]) -> None:
    """Run the steps of one change of layout; the whole value and the whole gradient must survive it."""
    random = np.random.default_rng(0)
    whole, gradient = random.standard_normal((2, 24, 48))
    steps = reshard(src, dst, mesh)
    text = f"{format_layout(src)} -> {format_layout(dst)} on {mesh}: {steps}"

    held = scatter(whole, src, mesh, random)
    for step in steps:
        moved = run_forward(held, step)
        assert step.fraction == pytest.approx(max(held[0].size, moved[0].size) / whole.size), text
        held = moved
    np.testing.assert_allclose(join(held, dst, mesh), whole, atol=1e-9, err_msg=text)

    held = scatter(gradient, gradient_layout(dst), mesh, random)
    for step in reversed(steps):
        moved = run_backward(held, step)
        assert step.fraction == pytest.approx(max(held[0].size, moved[0].size) / whole.size), text
        held = moved
    np.testing.assert_allclose(join(held, gradient_layout(src), mesh), gradient, atol=1e-9, err_msg=text)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 3), (3, 1, 2)], ids=str)
def test_every_pair_of_layouts(mesh: tuple[int, ...]):
    layouts = list(itertools.product(PLACEMENTS, repeat=sum(size > 1 for size in mesh)))
    for src, dst in itertools.product(layouts, layouts):
        check_reshard(widen(src, mesh), widen(dst, mesh), mesh)


def widen(layout: Layout, mesh: tuple[int, ...]) -> Layout:
    """`layout` for the axes of `mesh` that have several devices, with something on those that have one."""
    placements = iter(layout)
    return tuple(next(placements) if size > 1 else S0 for size in mesh)


@settings(max_examples=300)
@given(
    src=st.tuples(*[st.sampled_from(PLACEMENTS)] * 3),
    dst=st.tuples(*[st.sampled_from(PLACEMENTS)] * 3),
    mesh=st.sampled_from([(2, 2, 2), (2, 3, 2), (3, 2, 2)]),
)
def test_three_axes(src: Layout, dst: Layout, mesh: tuple[int, ...]):
    check_reshard(src, dst, mesh)


def test_a_broken_step_is_caught(monkeypatch: pytest.MonkeyPatch):
    """The check itself can fail: a gather without its reduction in backward loses terms."""
    import autopar.placement as placement

    reshard.cache_clear()
    monkeypatch.setitem(placement._MOVES, ("S", "B"), ("all_gather", "slice"))
    try:
        with pytest.raises(AssertionError):
            check_reshard((S0,), (B,), (2,))
    finally:
        reshard.cache_clear()


@pytest.mark.parametrize("layout", [(R,), (S0, S1), (P, B), (S0, S0)], ids=format_layout)
def test_no_change_costs_nothing(layout: Layout):
    assert reshard(layout, layout, (2,) * len(layout)) == ()


def test_one_device_costs_nothing():
    assert reshard((P,), (R,), (1,)) == ()


@pytest.mark.parametrize(
    ("src", "dst", "forward", "backward"),
    [
        ((P,), (R,), ["all_reduce"], ["none"]),
        ((B,), (R,), ["none"], ["mask"]),
        ((R,), (B,), ["none"], ["all_reduce"]),
        ((P,), (S0,), ["reduce_scatter"], ["all_gather"]),
        ((S0,), (S1,), ["all_to_all"], ["all_to_all"]),
        ((S0,), (B,), ["all_gather"], ["reduce_scatter"]),
        ((P, P), (R, R), ["all_reduce"], ["none"]),  # alike neighbors move as one
        ((S0, S0), (R, R), ["all_gather"], ["slice"]),
        ((R, P), (R, S1), ["reduce_scatter"], ["all_gather"]),
        ((S0, R), (S0, S1), ["slice"], ["all_gather"]),
    ],
)
def test_known_changes_take_the_known_collectives(src: Layout, dst: Layout, forward: list[str], backward: list[str]):
    steps = reshard(src, dst, (2,) * len(src))
    assert [step.forward for step in steps] == forward
    assert [step.backward for step in steps] == backward


def test_a_collective_is_never_listed_twice_for_a_change_on_one_axis():
    for src, dst in itertools.product(PLACEMENTS, PLACEMENTS):
        assert len(reshard((src,), (dst,), (4,))) == (src != dst)
