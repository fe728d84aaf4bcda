"""Constraints as text: what is read, and every way to get it wrong."""

from __future__ import annotations

import pytest

from autopar.errors import ConstraintError
from autopar.search.settings.constraints import LayerDemands, check_patterns, demands_on, parse_constraints
from tests.search.across_programs import decoder_model

PROGRAM = decoder_model(2, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)


def test_globals_hold_for_every_layer() -> None:
    constraints = parse_constraints(["data=4", "zero=3", "recompute=full", "mesh=2x4"], 8)
    assert constraints.get("mesh") == (2, 4)
    expected = LayerDemands((("data", 4),), 3, "full")
    assert demands_on(PROGRAM, constraints) == (expected,) * 4


def test_scoped_ones_hold_where_the_pattern_matches_and_override_globals() -> None:
    constraints = parse_constraints(["zero=1", "blocks.*: zero=3", "head: replicate"], 8)
    demands = demands_on(PROGRAM, constraints)
    assert [each.zero for each in demands] == [1, 3, 3, 1]
    assert [bool(each.whole) for each in demands] == [False, False, False, True]


def test_parameters_are_matched_by_name() -> None:
    demands = demands_on(PROGRAM, parse_constraints(["blocks.1.w_gate: tensor=2"], 8))
    assert [each.degrees for each in demands] == [(), (), (("tensor", 2),), ()]


@pytest.mark.parametrize(
    ("typed", "texts"),
    [
        (["tp=2", "DP = 4"], ["tensor=2", "data=4"]),
        (["sp=2"], ["sequence=2"]),
        (["cp=2"], ["context=2"]),
        (["fsdp"], ["zero=3"]),
        (["fsdp=8"], ["data=8", "zero=3"]),
        (["tp=4", "pp=2"], ["pipeline=2", "tensor=4"]),
        (["blocks.1: fsdp"], ["blocks.1: zero=3"]),
    ],
)
def test_words_that_people_type(typed: list[str], texts: list[str]) -> None:
    got, want = parse_constraints(typed, 8), parse_constraints(texts, 8)
    assert sorted(map(str, got.settings)) == sorted(map(str, want.settings))
    assert [(x.pattern, x.key, x.value) for x in got.scoped] == [(x.pattern, x.key, x.value) for x in want.scoped]


def test_a_pattern_is_compared_with_names_alone() -> None:
    constraints = parse_constraints(["block.1: zero=3", "batch_norm: per_microbatch"], 8)
    with pytest.raises(ConstraintError, match=r"'block\.1' matches no parameter.*near: blocks\.1"):
        check_patterns(constraints, ["blocks.1", "blocks.1.weight", "head.weight"])
    check_patterns(constraints, ["block.1.weight"])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ep=3"], "'ep=3': 3 does not divide the 8 devices"),
        (["tp=3"], "'tp=3': 3 does not divide the 8 devices"),
        (["dp=2", "data=4"], "'dp=2' and 'data=4' contradict"),
        (["tensr=2"], "did you mean 'tensor'"),
        (["recompute=ful"], "did you mean 'full'"),
        (["tensor=3"], "3 does not divide the 8 devices"),
        (["tensor=two"], "'two' is not a whole number"),
        (["data=2 zero=3"], r"is more than one: write a text for each, as in \['data=2', 'zero=3'\]"),
        (["zero=4"], "the ZeRO level is 0, 1, 2 or 3"),
        (["data=0"], "at least 1"),
        (["mesh=2x2"], "4 devices, but there are 8"),
        (["data=2", "data=4"], "'data=2' and 'data=4' contradict"),
        (["data=4", "tensor=4"], "need a multiple of 16 devices"),
        (["replicate"], "needs a pattern before it"),
        (["head: mesh=2x4"], "holds for the whole plan"),
        (["head: replicate=1"], "takes no value"),
    ],
)
def test_mistakes_are_named(texts: list[str], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        parse_constraints(texts, 8)


def test_a_pattern_that_matches_nothing_lists_names_that_are_near() -> None:
    with pytest.raises(ConstraintError, match=r"matches no parameter.*blocks\.0"):
        demands_on(PROGRAM, parse_constraints(["block.0: zero=3"], 8))


def test_patterns_that_contradict_each_other_on_a_layer() -> None:
    with pytest.raises(ConstraintError, match=r"both match layer 'blocks\.1'"):
        demands_on(PROGRAM, parse_constraints(["blocks.*: zero=3", "blocks.1: zero=1"], 8))
