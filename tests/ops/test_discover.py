"""Ops without a rule: what is found is true, what can't be split is left whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ops import RuleMatch
from autopar.program import Op, Option, Ref, TensorType
from autopar.trace.annotations.discover import MAX_ELEMENTS, discover_options
from tests.ops.harness import Sample, as_op, call, check_options, sample, tensor_type
from tests.ops.samples import ids, x


def leaf(part: Tensor) -> Tensor:
    return part.detach().requires_grad_(part.is_floating_point())


def define(name: str, schema: str, forward, *, differentiable: bool = True) -> None:
    """A custom op ``testlib::name``; differentiable by autograd through `forward`."""
    op = torch.library.custom_op(f"testlib::{name}", forward, mutates_args=(), schema=schema)
    if not differentiable:
        return

    def setup_context(ctx, inputs, output):
        ctx.inputs = inputs

    def backward(ctx, *gradients):
        with torch.enable_grad():
            again = [part.detach().requires_grad_(part.is_floating_point()) if isinstance(part, Tensor)
            else part
                     for part in ctx.inputs]  # fmt: skip
            out = forward(*again)
            wanted = [part for part in again if isinstance(part, Tensor) and part.requires_grad]
            found = iter(torch.autograd.grad(out, wanted, gradients, allow_unused=True))
        return tuple(next(found) if isinstance(p, Tensor) and p.requires_grad else None for p in again)

    op.register_autograd(backward, setup_context=setup_context)


@pytest.fixture(scope="module", autouse=True)
def _ops():
    define("swiglu", "(Tensor gate, Tensor up) -> Tensor", lambda gate, up: torch.nn.functional.silu(gate) * up)
    define("project", "(Tensor x, Tensor w, Tensor b) -> Tensor", lambda x, w, b: x @ w.t() + b)
    define("center", "(Tensor x) -> Tensor", lambda x: x - x.mean())
    define("norm_rows", "(Tensor x) -> Tensor", lambda x: x / (1 + x.square().sum(-1, keepdim=True)))
    define("noise", "(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x))
    define("lookup", "(Tensor table, Tensor ids) -> Tensor", lambda table, ids: table[ids])
    define("forward_only", "(Tensor x) -> Tensor", lambda x: x.cumsum(1), differentiable=False)
    define("roots", "(Tensor x) -> Tensor", lambda x: x.sqrt())
    define("mean_root", "(Tensor x) -> Tensor", lambda x: x.sqrt().mean())
    define("bounded_steps", "(Tensor x) -> Tensor", _bounded_steps)
    define("broken", "(Tensor x) -> Tensor", _refuse)
    define("reshaped", "(Tensor x, int size) -> Tensor", lambda x, size: x.tanh().reshape(-1, size).clone())
    # sums forward, but its backward (which divides by the size it sees) doesn't come from terms
    define("uneven", "(Tensor x) -> Tensor", lambda x: x.sum() + (x - x.detach()).sum() / x.numel())


def _refuse(x: Tensor) -> Tensor:
    raise RuntimeError("not on this device")


def _bounded_steps(x: Tensor) -> Tensor:
    return torch.cat([torch.full_like(x[:1], -torch.inf), x[1:] - x[:-1]])


def discover(case: Sample) -> tuple[Option, ...]:
    op, tensors = as_op(case)
    results = call(case, tensors)
    return discover_options(op, tuple(map(tensor_type, tensors)), tuple(map(tensor_type, results)))


def shown(case: Sample) -> set[str]:
    """What was found, as text; checked by the rules' own harness."""
    found = discover(case)
    if found:
        check_options(case, RuleMatch(found))
    return {
        f"{o.factor} {','.join(map(str, o.operands))} -> {','.join(map(str, o.results))} /{o.extent}"
        for o in found if o.factor not in "-~"
    }  # fmt: skip


def test_elementwise_ops_split_in_every_dim():
    assert shown(sample("testlib.swiglu.default", x(4, 6), x(4, 6))) == {
        "x0d0_x1d0 S(0),S(0) -> S(0) /4", "x0d1_x1d1 S(1),S(1) -> S(1) /6", "+1 B,P -> P /0",
    }  # fmt: skip


def test_a_product_with_a_bias_has_all_its_factors():
    assert shown(sample("testlib.project.default", x(4, 6), x(8, 6), x(8))) == {
        "x0d0 S(0),B,B -> S(0) /4",
        "x1d0_x2d0 B,S(0),S(0) -> S(1) /8",
        "x0d1_x1d1 S(1),S(1),P -> P /6",
        "+02 P,B,P -> P /0",
        "+12 B,P,P -> P /0",
    }


def test_an_op_that_couples_everything_is_only_linear():
    assert shown(sample("testlib.center.default", x(4, 6))) == {"+ P -> P /0"}


def test_an_op_that_couples_rows_splits_between_rows():
    assert shown(sample("testlib.norm_rows.default", x(4, 6))) == {"x0d0 S(0) -> S(0) /4"}


def test_a_table_splits_in_its_columns_and_its_ids():
    assert shown(sample("testlib.lookup.default", x(10, 6), ids(10, 4))) >= {
        "x0d1 S(1),B -> S(1) /6", "x1d0 B,S(0) -> S(0) /4",
    }  # fmt: skip
    assert not any("x0d0" in text for text in shown(sample("testlib.lookup.default", x(10, 6), ids(10, 4))))


def test_a_random_op_a_broken_op_and_an_op_without_tensors_run_whole():
    assert discover(sample("testlib.noise.default", x(4, 6))) == ()
    kind = TensorType((4, 6), "float64")
    assert discover_options(Op("op", "testlib.broken.default", (Ref("x"),), (), ("y",)), (kind,), (kind,)) == ()
    assert (
        discover_options(Op("op", "aten.ones.default", ((4,),), (), ("y",)), (), (TensorType((4,), "float32"),)) == ()
    )


def test_an_op_without_a_backward_is_judged_by_its_forward():
    found = discover(sample("testlib.forward_only.default", x(4, 6)))
    assert {o.factor for o in found} == {"-", "~", "x0d0", "+"}


def test_a_backward_that_does_not_recombine_is_noticed():
    """Forward gives terms of a sum; backward depends on the size of the slice."""
    assert shown(sample("testlib.uneven.default", x(4, 6))) == {"+ P -> P /0"}


def test_the_same_value_twice_is_two_operands():
    case = sample("testlib.swiglu.default", x(4, 6), x(4, 6))
    op, tensors = as_op(case)
    kinds = tuple(map(tensor_type, tensors))
    twice = Op("op", op.target, (Ref("a"), Ref("a")), (), ("y",))
    assert [o.factor for o in discover_options(twice, kinds, kinds[:1])] == [o.factor for o in discover(case)]


def test_large_operands_are_shrunk_and_the_extent_is_the_real_one():
    kind, rows = TensorType((4096, 8192), "bfloat16"), MAX_ELEMENTS
    op = Op("op", "testlib.norm_rows.default", (Ref("x"),), (), ("y",))
    assert [(o.factor, o.extent) for o in discover_options(op, (kind,), (kind,)) if o.extent] == [("x0d0", 4096)]
    sized = Op("op", "testlib.reshaped.default", (Ref("x"), 4096), (), ("y",))
    tall, wide = TensorType((rows // 64, 4096), "float32"), TensorType((rows // 64, 4096), "float32")
    assert [(o.factor, o.extent) for o in discover_options(sized, (tall,), (wide,)) if o.extent] == [("x0d0", 4096)]


def test_an_op_that_is_nan_for_half_of_all_numbers_splits_by_the_other_half():
    assert shown(sample("testlib.roots.default", x(4, 6))) == {"x0d0 S(0) -> S(0) /4", "x0d1 S(1) -> S(1) /6"}


def test_an_op_that_is_nan_or_infinite_is_not_split_by_that():
    """Any two NaN agree, and a tolerance relative to infinity allows everything: neither says anything of a split."""
    assert shown(sample("testlib.bounded_steps.default", x(4, 6))) == {"x0d1 S(1) -> S(1) /6", "+ P -> P /0"}
    assert shown(sample("testlib.mean_root.default", x(4, 6))) == set()
