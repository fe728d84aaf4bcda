"""A wrong rule is caught: each of these claims is false in one way, and the harness has to say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.ops import RuleMatch
from autopar.ops.derivation import derive_options
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, shard
from autopar.program import Op, Option
from tests.ops.harness import (
    RuleViolationError,
    Sample,
    as_op,
    call,
    check_options,
    match,
    sample,
    tensor_type,
)
from tests.ops.samples import ids, x


def check_line(case: Sample, line: str) -> int:
    op, tensors = as_op(case)
    results = call(case, tensors)
    options = derive_options(line, op, tuple(map(tensor_type, tensors)), tuple(map(tensor_type, results)))
    assert options is not None
    return check_options(case, RuleMatch(options))


def with_option(case: Sample, factor: str, **changes: object) -> RuleMatch:
    found = match(case)
    assert found is not None
    assert factor in {option.factor for option in found.options}
    return replace(found, options=tuple(replace(o, **changes) if o.factor == factor else o for o in found.options))


WRONG_LINES = {
    "softmax over a split dim": (sample("softmax.int", x(4, 6), 1), "* f -> * f"),
    "layer norm over a split dim": (sample("layer_norm", x(4, 6), [6], x(6), x(6)), "* h, #, h, h -> * h"),
    "rows taken for columns": (sample("sum.dim_IntList", x(4, 4), [1]), "_ f -> f"),
    "maximum as a sum": (sample("amax", x(4, 6), [1]), "* h -> * | sum h"),
    "bias added by every device": (sample("linear", x(4, 6), x(8, 6), x(8)), "* h, f h, f -> * f | sum h"),
    "square as linear": (sample("square", x(4, 6)), "* -> * | plus 0"),
    "number added to terms": (sample("add.Scalar", x(4, 6), 2.0), "* -> * | plus 0"),
    "batch statistics of a slice": (
        sample("batch_norm", x(4, 6, 5), None, None, None, None, True, 0.1, 1e-5, False),
        "* -> *",
    ),
    "inner part of a merged dim": (sample("view", x(4, 6), [24]), "_ d -> d"),
    "mean as a sum of terms": (sample("mean.dim", x(4, 6), [1]), "* h -> * | sum h"),
    "cumsum over a split dim": (sample("cumsum", x(4, 6), 1), "* f -> * f"),
    "causal query rows": (
        sample("scaled_dot_product_attention", x(2, 4, 6, 3), x(2, 4, 6, 3), x(2, 4, 6, 3), None, 0.0, True),
        "* q _, * _ _, * _ _ -> * q _",
    ),
    "groups of a convolution": (
        sample("conv1d", x(2, 4, 5), x(4, 2, 3), None, [1], [0], [1], 2),
        "n c _, c _ _ -> n c _",
    ),
    "vocabulary without its kernel": (sample("embedding", x(12, 6), ids(12, 4)), "v h, * -> * h | sum v"),
    "size argument kept global": (sample("expand", x(6), [4, 6]), "d1, # -> _ d1"),
    "flip of a split dim": (sample("flip", x(4, 6), [1]), "* -> *"),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_wrong_line_is_caught(name: str):
    case, line = WRONG_LINES[name]
    with pytest.raises(RuleViolationError):
        check_line(case, line)


CASE = sample("linear", x(4, 6), x(8, 6), x(8))

WRONG_OPTIONS = {
    "weight read as R where its gradients are terms": (
        "d0",
        {"operands": (shard(0), REPLICATE, BROADCAST)},
        "operand 1",
    ),
    "bias gradient taken for whole": ("d0", {"operands": (shard(0), BROADCAST, REPLICATE)}, "operand 2"),
    "whole gradient taken for terms": ("-", {"operands": (BROADCAST, REPLICATE, REPLICATE)}, "operand 0"),
    "terms taken for the whole result": ("h", {"results": (REPLICATE,)}, "result 0"),
    "slices taken for terms": ("f", {"results": (PARTIAL,)}, "result 0"),
    "wrong result dim": ("d0", {"results": (shard(1),)}, "result 0"),
    "terms fed with terms of a gradient": ("+0", {"operands": (BROADCAST, BROADCAST, PARTIAL)}, "result 0"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_a_wrong_placement_is_caught_and_named(name: str):
    factor, changes, where = WRONG_OPTIONS[name]
    with pytest.raises(RuleViolationError, match=where):
        check_options(CASE, with_option(CASE, factor, **changes))


def test_an_extent_that_is_too_large_is_caught():
    q, k = x(2, 4, 6, 3), x(2, 2, 6, 3)
    case = sample("scaled_dot_product_attention", q, k, k.clone(), enable_gqa=True)
    check_options(case)
    with pytest.raises(RuleViolationError):
        check_options(case, with_option(case, "d1", extent=4))


def test_repeated_factor_names_are_caught():
    found = match(CASE)
    assert found is not None
    with pytest.raises(RuleViolationError, match="bad factor names"):
        check_options(CASE, replace(found, options=(*found.options, found.options[0])))


def test_a_missing_whole_option_is_caught():
    with pytest.raises(RuleViolationError, match="bad factor names"):
        check_options(CASE, RuleMatch((Option("-", (REPLICATE,) * 3, (REPLICATE,)),)))


def test_the_right_rule_passes():
    assert check_options(CASE) >= 7
    assert isinstance(as_op(CASE)[0], Op)
    assert torch.equal(call(CASE, as_op(CASE)[1])[0], torch.nn.functional.linear(*CASE.args))
