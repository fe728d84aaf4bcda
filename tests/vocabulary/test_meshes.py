"""Axes, local shapes, refinements and the text of layouts."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanFormatError
from autopar.placement import (
    BROADCAST,
    PARTIAL,
    REPLICATE,
    Axis,
    Layout,
    Placement,
    format_layout,
    local_shape,
    mesh_axes,
    parse_layout,
    refine_layout,
    refine_mesh,
    shard,
)
from tests.vocabulary.simulated_reshard import join, scatter

R, P, B = REPLICATE, PARTIAL, BROADCAST
S0, S1 = shard(0), shard(1)
PLACEMENTS = (R, P, B, S0, S1)
layouts = st.lists(st.sampled_from([R, P, B, S0, S1, shard(12)]), max_size=4).map(tuple)


@pytest.mark.parametrize("mesh", [(6,), (2, 3), (3, 2), (2, 2, 2), (4, 1, 2)], ids=str)
def test_axes_are_the_dims_of_the_ranks_laid_out_row_major(mesh: tuple[int, ...]):
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    for dim, axis in enumerate(mesh_axes(mesh)):
        assert axis.size == mesh[dim]
        for where in np.ndindex(*mesh):
            rank = int(ranks[where])
            line = ranks[(*where[:dim], slice(None), *where[dim + 1 :])]
            assert axis.coordinate(rank) == where[dim]
            assert axis.group(rank) == tuple(line)


def test_a_group_holds_its_rank_and_is_shared():
    axis = Axis(size=3, stride=2)
    for rank in range(12):
        assert rank in axis.group(rank)
        assert all(axis.group(other) == axis.group(rank) for other in axis.group(rank))


@given(layouts)
def test_layout_text_round_trip(layout: Layout):
    assert parse_layout(format_layout(layout)) == layout


def test_layout_text_is_as_documented():
    assert format_layout((S0, R, P, B)) == "S(0),R,P,B"
    assert parse_layout(" S(0) , R") == (S0, R)
    assert parse_layout(format_layout((shard(1, 2), S0))) == (shard(1, 2), S0)
    assert format_layout(()) == ""
    assert Placement("S", 3) == shard(3)


@pytest.mark.parametrize("text", ["X", "S", "S()", "S(-1)", "S(0)R", "r", "S(0),Q", "S(0/0)", "S(/2)"])
def test_wrong_layout_text_is_quoted(text: str):
    with pytest.raises(PlanFormatError, match=r"is none of R, P, B, S\(<dim>\)"):
        parse_layout(text)


@given(
    layout=st.tuples(*[st.sampled_from(PLACEMENTS)] * 3),
    mesh=st.sampled_from([(2, 2, 2), (2, 3, 2), (1, 4, 3), (6, 2, 1)]),
)
def test_local_shape_is_what_a_rank_holds(layout: Layout, mesh: tuple[int, ...]):
    whole = np.zeros((24, 48))
    held = scatter(whole, layout, mesh, np.random.default_rng(0))
    assert {part.shape for part in held} == {local_shape(whole.shape, layout, mesh)}


def test_uneven_slices_are_refused():
    with pytest.raises(ValueError, match=r"dim 0 of shape \(6,\) does not divide"):
        local_shape((6,), (S0, S0), (2, 2))


@pytest.mark.parametrize(
    ("meshes", "refined"),
    [
        ([(4, 16), (8, 8)], (4, 2, 8)),
        ([(8,), (2, 4)], (2, 4)),
        ([(2, 4), (4, 2)], (2, 2, 2)),
        ([(6,), (3, 2), (6, 1)], (3, 2)),
        ([(1,), (1, 1)], (1,)),
        ([(2, 1, 4)], (2, 4)),
    ],
)
def test_known_refinements(meshes: list[tuple[int, ...]], refined: tuple[int, ...]):
    assert refine_mesh(*meshes) == refined


@pytest.mark.parametrize("meshes", [[(2, 3), (3, 2)], [(4,), (8,)], [(2, 6), (3, 4)]])
def test_meshes_without_common_refinement_are_refused(meshes: list[tuple[int, ...]]):
    with pytest.raises(ValueError, match="no common refinement"):
        refine_mesh(*meshes)


CHAINS = [(2, 2, 2), (2, 3, 2), (3, 2, 2, 2)]


def mergings(chain: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every mesh that merges neighbors of `chain`."""
    cuts = itertools.product([False, True], repeat=len(chain) - 1)
    merged: list[tuple[int, ...]] = []
    for cut in cuts:
        mesh = [chain[0]]
        for size, is_cut in zip(chain[1:], cut, strict=True):
            mesh = [*mesh, size] if is_cut else [*mesh[:-1], mesh[-1] * size]
        merged.append(tuple(mesh))
    return merged


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_all_mergings_of_a_chain_refine_and_no_coarser_mesh_would_do(chain: tuple[int, ...]):
    for first, second in itertools.product(mergings(chain), repeat=2):
        refined = refine_mesh(first, second)
        strides = {axis.stride for axis in mesh_axes(refined)}
        assert math.prod(refined) == math.prod(chain)
        wanted = {axis.stride for mesh in (first, second) for axis in mesh_axes(mesh)}
        assert strides == wanted


@given(data=st.data(), chain=st.sampled_from(CHAINS))
def test_a_refined_layout_holds_the_same_slices(data: st.DataObject, chain: tuple[int, ...]):
    """Scattered by the refined layout, the pieces join by the coarse one, and the other way."""
    mesh = data.draw(st.sampled_from(mergings(chain)))
    layout: Layout = data.draw(st.tuples(*[st.sampled_from(PLACEMENTS)] * len(mesh)))
    refined = refine_mesh(mesh, data.draw(st.sampled_from(mergings(chain))))
    fine = refine_layout(layout, mesh, refined)
    random = np.random.default_rng(0)
    whole = random.standard_normal((24, 48))
    np.testing.assert_allclose(join(scatter(whole, layout, mesh, random), fine, refined), whole, atol=1e-12)
    np.testing.assert_allclose(join(scatter(whole, fine, refined, random), layout, mesh), whole, atol=1e-12)
    assert local_shape(whole.shape, fine, refined) == local_shape(whole.shape, layout, mesh)


def test_axes_of_one_device_refine_to_nothing():
    assert refine_layout((S1, S0), (1, 4), (2, 2)) == (S0, S0)
    assert refine_layout((R,), (1,), (1,)) == (R,)
