"""When a program may run in microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ConstraintError
from autopar.placement import shard
from autopar.program import KernelCollective, Option, Program, Ref
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.search.settings.constraints import demands_on, parse_constraints
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
    assert "computes the loss from whole outputs" in found


def outputs_model(*, returns_weight: bool = False) -> Program:
    """No loss: features of each sample, their labels, and a count that depends on no parameter."""
    b = ModelBuilder()
    x = b.add("x", (8, 16), "input", grad=False)
    w = b.add("weight", (4, 16), "parameter")
    features = b.op("aten.linear.default", (Ref(x), Ref(w)), (8, 4))
    scaled = b.op("aten.mul.Tensor", (Ref(w), 2.0), (4, 16))
    b.cut(0, (features, scaled))
    return b.whole((x,), (features, scaled) if returns_weight else (features,), "")


def test_outputs_are_joined_where_the_runtime_does_that() -> None:
    program = outputs_model()
    found = time_assignment(program, 2, joins_outputs=True)
    assert isinstance(found, TimeAssignment)
    assert found.factors[0][0] == "d0"
    assert not found.notes
    assert "computes the loss from whole outputs" in str(time_assignment(program, 2))


def test_an_output_that_every_microbatch_gives_whole_can_not_be_joined() -> None:
    found = time_assignment(outputs_model(returns_weight=True), 2, joins_outputs=True)
    assert isinstance(found, str)
    assert "aten.mul.Tensor" in found


def normed_model() -> Program:
    """Batch norm in two layers of one kind, and in a third of another; without running statistics."""
    b = ModelBuilder()
    x = source = b.add("x", (8, 6), "input", grad=False)
    x = b.op("aten.linear.default", (Ref(x), Ref(b.add("weight", (6, 6), "parameter"))), (8, 6))
    b.cut(0, (x,), "layer1.")
    for layer, (kind, width) in enumerate(((1, 6), (1, 6), (2, 4)), 1):
        h = b.op("aten.linear.default", (Ref(x), Ref(b.add("weight", (width, 6), "parameter"))), (8, width))
        x = b.op("autopar.batch_norm", (Ref(h), None, None, None, None, 0.1, 1e-5), (8, width))
        b.ops[-1] = replace(b.ops[-1], options=NORM_OPTIONS)
        b.cut(kind, (x,), f"layer{layer + 1}.")
    loss = b.op("aten.sum.default", (Ref(x),), ())
    b.cut(3, (loss,))
    return b.whole((source,), (loss,), loss)


NORM_OPTIONS = (
    Option("c", (shard(1),), (shard(1),), 2),
    Option("b", (shard(0),), (shard(0),), 8, "sync_batch_norm", (KernelCollective("all_reduce", "forward", 0, (0,)),)),
)


def test_batch_norm_takes_microbatches_for_the_batch_only_if_named() -> None:
    program = normed_model()
    refused = time_assignment(program, 2)
    assert isinstance(refused, str)
    assert "'batch_norm: per_microbatch' would let it" in refused
    for patterns in (["batch_norm"], ["autopar.*"], ["*"], ["layer1", "layer[23]"]):
        found = time_assignment(program, 2, per_microbatch=patterns)
        assert isinstance(found, TimeAssignment), found
        assert [found.factors[kind][1] for kind in (1, 2)] == ["b", "b"]
        (note,) = found.notes
        assert "autopar.batch_norm (layer1 and 2 more) uses the statistics of each of 2 microbatches" in note


def test_layers_that_run_alike_must_all_be_named() -> None:
    for patterns in (["layer1", "layer3"], ["layer1", "layer2"], ["layer3"], ["linear"]):
        assert isinstance(time_assignment(normed_model(), 2, per_microbatch=patterns), str), patterns


def test_what_compares_samples_can_not_be_named() -> None:
    found = time_assignment(coupled_model(), 2, per_microbatch=["*"])
    assert isinstance(found, str)
    assert "no constraint can allow it" in found
    with pytest.raises(ConstraintError, match="balance losses multiply can: nowhere in this model"):
        demands_on(coupled_model(), parse_constraints(["*: per_microbatch"], 1))
    with pytest.raises(ConstraintError, match=r"'dropout' matches nothing .*: layer1, layer2, layer3"):
        demands_on(normed_model(), parse_constraints(["dropout: per_microbatch"], 1))
    with pytest.raises(ConstraintError, match="takes no value"):
        parse_constraints(["batch_norm: per_microbatch=2"], 1)
    with pytest.raises(ConstraintError, match="needs a pattern before it"):
        parse_constraints(["per_microbatch"], 1)
