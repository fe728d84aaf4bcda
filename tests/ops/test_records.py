"""Records of ops agree with torch and with themselves, and a new op is one record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RuleError
from autopar.lower.kernels import KERNELS, OPS
from autopar.ops import Work, count_work, family_of, is_cheap, own_families, registry, result_order
from autopar.ops.declaration import parse
from autopar.ops.memory_order import Order
from autopar.program import Op, Program, Ref, TensorType
from autopar.search import SearchRequest, search
from autopar.trace import trace
from tests.ops.harness import sample
from tests.zoo import quick_prices

GATE = "testlib.gate.default"


@pytest.fixture(autouse=True)
def _forget_user_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


def test_no_op_is_in_two_records() -> None:
    targets = [target for family in own_families() for target in family.rules]
    assert len(targets) == len(set(targets))


def test_records_name_the_functions_that_run_them_and_the_kernels_of_their_rules() -> None:
    for family in own_families():
        assert all(target in OPS for target in family.rules if target.startswith("autopar."))
        assert all(name in KERNELS for name in family.kernels)
        for rule in family.rules.values():
            if isinstance(rule, str):
                assert {kernel for _, kernel in parse(rule).kernels} <= family.kernels.keys()


x = torch.arange(24.0).reshape(2, 3, 4)
CALLS: dict[str, tuple[str, Tensor, tuple[Any, ...]]] = {
    "an elementwise op lies as its operand": ("exp", x.permute(2, 0, 1), ()),
    "so does one that compares": ("eq.Scalar", x.transpose(0, 1), (1.0,)),
    "a cast": ("_to_copy", x.transpose(1, 2), ()),
    "a copy in order": ("contiguous", x.transpose(1, 2), ()),
    "dims by another name for transpose": ("swapaxes", x, (0, 2)),
    "last dims exchanged": ("mT", x.transpose(0, 1), ()),
    "a dim moved": ("movedim.int", x, (2, 0)),
    "dims in any order": ("permute", x.transpose(0, 1), ([2, 0, 1],)),
    "repeated rows": ("expand", x.transpose(0, 1)[:, :1], ([3, 5, 4],)),
    "a view of what is in order": ("reshape", x, ([6, 4],)),
    "a copy of what is not": ("reshape", x.transpose(0, 1), ([6, 4],)),
    "a flat copy of what is not": ("ravel", x.transpose(0, 1), ()),
    "a new dim": ("unsqueeze", x.transpose(0, 1), (1,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_lie_in_memory_as_torch_puts_them(name: str) -> None:
    target, operand, args = CALLS[name]
    qualified = sample(target).target
    packet, overload = qualified.split(".")[1:]
    result = getattr(getattr(torch.ops.aten, packet), overload)(operand, *args)
    frozen = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args)
    op = Op("op", qualified, (Ref("x"), *frozen), (), ("y",), is_view=family_of(qualified).is_view)
    is_view, order = result_order(op, tuple(operand.shape), Order(operand.stride()), tuple(result.shape))
    assert is_view == (result.untyped_storage().data_ptr() == operand.untyped_storage().data_ptr())
    assert order.strides == result.stride()


def test_an_op_without_a_record_is_costly_if_a_library_has_it_and_counted_by_its_bytes() -> None:
    op = Op("op", "mylib.special.default", (Ref("x"),), (), ("y",))
    assert not is_cheap(op)
    assert is_cheap(Op("op", "aten.strange.default", (Ref("x"),), (), ("y",)))
    eight = TensorType((8,), "float32")
    assert (count_work(op, (eight,), (eight,)).kind, count_work(op, (eight,), (eight,)).num_bytes) == ("bytes", 64)


def test_an_overload_that_no_record_names_is_taken_for_another_one_of_its_packet() -> None:
    assert family_of("aten.mm.dtype") is family_of("aten.mm.default")
    assert family_of("aten.randint.low").draws(Op("op", "aten.randint.low", (), (), ("y",)))


def test_a_rule_of_the_user_keeps_what_else_is_known_of_the_op() -> None:
    autopar.register_rule("aten.mm.default", "m k, k n -> m n | sum k")
    assert not family_of("aten.mm.default").is_cheap
    autopar.register_rule("aten.mm.default", "m k, k n -> m n | sum k", is_cheap=True)
    assert family_of("aten.mm.default").is_cheap
    assert family_of("aten.mm.default").count_work is family_of("aten.bmm.default").count_work


@pytest.mark.parametrize("trait", ["flops", "kernels"])
def test_a_trait_that_an_op_can_not_be_given_is_refused(trait: str) -> None:
    with pytest.raises(RuleError, match=f"{trait}.*count_work"):
        autopar.register_rule(GATE, "*, * -> *", **{trait: 3})
    assert family_of(GATE).rules == {}


# ---------------------------------------------------------------- a new op


@pytest.fixture
def gate() -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """``testlib::gate``: a times the sigmoid of b, which keeps only the sigmoid and a."""
    with torch.library._scoped_library("testlib", "FRAGMENT") as library:
        library.define("gate(Tensor a, Tensor b) -> Tensor")
        library.impl("gate", lambda a, b: a * torch.sigmoid(b), "CompositeExplicitAutograd")
        torch.library.register_fake("testlib::gate", lambda a, b: torch.empty_like(a), lib=library)

        def setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
            ctx.save_for_backward(inputs[0], torch.sigmoid(inputs[1]))

        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            a, s = ctx.saved_tensors
            return gradient * s, gradient * a * s * (1 - s)

        torch.library.register_autograd("testlib::gate", backward, setup_context=setup, lib=library)
        yield torch.ops.testlib.gate


class Gated(nn.Module):
    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = gate
        self.left, self.right, self.down = nn.Linear(8, 64), nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.gate(self.left(x), self.right(x))) - x).square().mean()


def _work(op: Op, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> Work:
    size = results[0].num_bytes
    return Work("bytes", results[0].dtype, read_bytes=2 * size, write_bytes=size, backward_read_bytes=1e12)


def _gate_of(program: Program) -> Op:
    return next(op for layer in program.layers for op in layer.ops if op.target == GATE)


def test_a_new_op_is_one_record(gate: Callable[[Tensor, Tensor], Tensor]) -> None:
    autopar.register_rule(
        GATE, "*, * -> *",
        is_cheap=True, count_work=_work, saves=lambda op, operands, results: ((0,), results[0].num_bytes),
    )  # fmt: skip
    torch.manual_seed(0)
    model, inputs = Gated(gate), {"x": torch.randn(8, 8)}
    program = trace(model, (), inputs).program
    op = _gate_of(program)
    assert op.rule_source == "rule"
    assert is_cheap(op)
    assert (op.saves, op.saved_extra_bytes) == ((0,), 8 * 64 * 4)
    types = tuple(map(program.type_of, op.operands))
    prices = quick_prices(2)
    assert prices.op_s(op, types, types[:1], differentiable=True).backward_s > 0.1  # of 1e12 bytes

    plan = search(program, 2, prices, SearchRequest(constraints=("tensor=2", "recompute=selective")))
    factors = [
        found
        for layer, planned in zip(program.layers, plan.layers, strict=True)
        for each, found in zip(layer.ops, plan.strategies[planned.strategy].assignments, strict=True)
        if each is op
    ]
    assert factors == [("d1",)]
    assert "2 ranks against one device" in str(autopar.verify(model, plan, inputs, shrink=False))


def test_without_a_record_the_new_op_is_tried_and_kept_as_it_is_seen(gate: Callable[[Tensor, Tensor], Tensor]) -> None:
    op = _gate_of(trace(Gated(gate), (), {"x": torch.randn(8, 8)}).program)
    assert op.rule_source == "discovered"
    assert not is_cheap(op)
    assert (op.saves, op.saved_extra_bytes) == ((0,), 8 * 64 * 4)
