"""When a program may run in microbatches."""

from __future__ import annotations

from dataclasses import replace

from autopar.program import Program, Ref
from autopar.search.microbatch import TimeAssignment, time_assignment
from tests.search.across_programs import ModelBuilder, decoder_model

PROGRAM = decoder_model(2, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)


def coupled_model() -> Program:
    """A loss that compares every sample with every other."""
    b = ModelBuilder()
    x = b.add("x", (8, 16), "input", grad=False)
    w = b.add("weight", (4, 16), "parameter")
    features = b.op("aten.linear.default", (Ref(x), Ref(w)), (8, 4))
    pairs = b.op("aten.linear.default", (Ref(features), Ref(features)), (8, 8))
    loss = b.op("aten.sum.default", (Ref(pairs),), ())
    b.cut(0, (loss,))
    return b.whole((x,), (loss,), loss)


def test_samples_run_apart_and_the_denominator_sees_all_labels() -> None:
    found = time_assignment(PROGRAM, 4)
    assert isinstance(found, TimeAssignment)
    assert set(found.factors) == {0, 1, 2}
    assert set(found.factors[1]) == {"d0"}
    head = dict(zip((op.target for op in PROGRAM.layers[-1].ops), found.factors[2], strict=True))
    assert head["autopar.cross_entropy_denominator"] == "-"
    assert head["aten.div.Tensor"].startswith("+")
    assert head["aten.linear.default"] == "d0"


def test_one_microbatch_needs_no_factors() -> None:
    found = time_assignment(PROGRAM, 1)
    assert isinstance(found, TimeAssignment)
    assert set(found.factors.values()) == {()}


def test_a_batch_that_does_not_divide_is_refused() -> None:
    assert isinstance(time_assignment(PROGRAM, 3), str)


def test_samples_that_are_compared_with_each_other_are_refused_by_op() -> None:
    found = time_assignment(coupled_model(), 2)
    assert isinstance(found, str)
    assert "aten.linear.default (linear_1" in found


def test_without_a_loss_there_is_nothing_to_add_up() -> None:
    found = time_assignment(replace(PROGRAM, loss=""), 2)
    assert isinstance(found, str)
    assert "no scalar loss" in found
