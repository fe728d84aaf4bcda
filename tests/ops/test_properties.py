"""Shapes at random: reshapes, broadcasting and einsums split as their rules say."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.harness import check_options, match, sample

sizes = st.sampled_from([1, 2, 3, 4, 6])


def draw_factorization(draw: st.DrawFn, total: int) -> list[int]:
    shape: list[int] = []
    while total > 1:
        size = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        shape.append(size)
        total //= size
        if len(shape) == 5:
            shape.append(total)
            break
    return shape


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    total = draw(st.sampled_from([1, 4, 12, 24, 36, 48]))
    return draw_factorization(draw, total), draw_factorization(draw, total)


@settings(max_examples=20)
@given(reshapes())
def test_any_reshape_splits_as_its_rule_says(shapes: tuple[list[int], list[int]]):
    source, target = shapes
    x = torch.randn(source, dtype=torch.float64)
    for name in ("view", "reshape"):
        check_options(sample(name, x, target))


@settings(max_examples=20)
@given(st.lists(sizes, max_size=3), st.lists(sizes, max_size=2), st.data())
def test_any_merged_or_split_dim_keeps_its_outer_part_as_a_factor(
    outer: list[int], inner: list[int], data: st.DataObject
):
    """[.., a, b, ..] <-> [.., a * b, ..]: slices of a are slices of a * b."""
    heads, dim = data.draw(sizes), data.draw(sizes)
    merged, parted = [*outer, heads * dim, *inner], [*outer, heads, dim, *inner]
    for source, target in ((merged, parted), (parted, merged)):
        case = sample("view", torch.randn(source, dtype=torch.float64), target)
        found = match(case)
        assert found is not None
        wanted = heads if heads > 1 else dim
        at = (len(outer), len(outer) + (heads == 1 and target is parted))
        extents = [o.extent for o in found.options if o.extent and o.results[0].dim == at[1]]
        assert wanted == 1 or extents == [wanted]
        check_options(case, found)


@st.composite
def broadcast_shapes(draw: st.DrawFn) -> list[list[int]]:
    whole = draw(st.lists(st.sampled_from([2, 3, 4]), max_size=3))
    shapes: list[list[int]] = []
    for _ in range(3):
        shape = [draw(st.sampled_from([1, size])) for size in whole]
        shapes.append(shape[draw(st.integers(0, len(shape))) :])
    return shapes


@settings(max_examples=20)
@given(broadcast_shapes())
def test_any_broadcasting_splits_as_its_rule_says(shapes: list[list[int]]):
    a, b, c = (torch.rand(shape, dtype=torch.float64) + 0.1 for shape in shapes)
    for name in ("add.Tensor", "mul.Tensor", "div.Tensor"):
        check_options(sample(name, a, b))
    check_options(sample("addcmul", a, b, c))
    check_options(sample("where.self", a > 0.5, b, c))


@settings(max_examples=20)
@given(st.data())
def test_any_einsum_splits_as_its_equation_says(data: st.DataObject):
    extents = dict(zip("abcd", (2, 4, 3, 2), strict=True))
    terms = [data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3)) for _ in range(2)]
    letters = sorted(set(terms[0]) | set(terms[1]))
    result = data.draw(st.lists(st.sampled_from(letters), unique=True))
    tensors = [torch.randn([extents[letter] for letter in term], dtype=torch.float64) for term in terms]
    check_options(sample("einsum", f"{''.join(terms[0])},{''.join(terms[1])}->{''.join(result)}", tensors))


@settings(max_examples=20)
@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_any_sum_gives_terms_over_its_dims(shape: list[int], data: st.DataObject):
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    x = torch.randn(shape, dtype=torch.float64)
    count = check_options(sample("sum.dim_IntList", x, dims, data.draw(st.booleans())))
    assert count >= sum(size > 1 for size in shape) or math.prod(shape) == 1
