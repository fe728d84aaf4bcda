"""Backward without autograd's engine gives the engine's gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.planning.call_traces import trace_model
from autopar.trace.annotations.backward_nodes import gradients_by_hand
from autopar.trace.annotations.saves import Kept, SavesMeter
from tests.ops.harness import as_op, call, sample, tensor_type
from tests.ops.samples import all_samples


def both(run: Any, leaves: list[Tensor]) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the leaves that need one: by hand, and the engine's."""
    found: list[list[Tensor | None]] = []
    for is_by_hand in (True, False):
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        operands = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
        operands = [x.view_as(x) if x.requires_grad else x for x in operands]
        needed = [x for x in operands if x.requires_grad]
        results = [x for x in run(operands) if x.requires_grad]
        if not results:
            return [], []
        arriving = [torch.randn(x.shape, dtype=x.dtype) for x in results]
        if is_by_hand:
            roots: list[Any] = [(x.grad_fn, x.output_nr) for x in results]
            found.append(gradients_by_hand(roots, arriving, needed))
        else:
            untyped: Any = torch.autograd
            found.append(list(untyped.grad(results, needed, arriving, allow_unused=True)))
    return found[0], found[1]


def test_every_sample_has_the_gradients_of_the_engine() -> None:
    checked = 0
    for each in (each for each in all_samples() if each.target.startswith("aten.")):
        operands = [x.requires_grad_(i not in each.fixed) if x.is_floating_point() else x
                    for i, x in enumerate(as_op(each)[1])]  # fmt: skip
        by_hand, engine = both(partial(call, each), operands)
        for ours, theirs in zip(by_hand, engine, strict=True):
            checked += ours is not None
            assert (ours is None) == (theirs is None), each.target
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, equal_nan=True, msg=each.target)
    assert checked > 300


class _Mixed(torch.autograd.Function):
    """Its second argument has no gradient, nor has its last, and its second result may get none."""

    @staticmethod
    def forward(ctx: Any, factor: float, mask: Tensor, x: Tensor, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mask, x, y)
        ctx.factor = factor
        return factor * mask * x * y, x + y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mask, x, y = ctx.saved_tensors
        product, total = gradients
        scaled = ctx.factor * mask * product
        return None, None, scaled * y + total, scaled * x + total, None


def apply_mixed(*args: Any) -> tuple[Tensor, Tensor]:
    untyped: Any = _Mixed
    return untyped.apply(*args)


@pytest.mark.parametrize("is_total_read", [True, False])
def test_a_custom_function_in_a_graph(is_total_read: bool) -> None:
    x, y, mask = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True), torch.ones(4, 6)

    def run(operands: list[Tensor]) -> list[Tensor]:
        x, y = operands
        product, total = apply_mixed(2.0, mask, x, y.expand(4, 6), "name")
        return [product.sum(0) + (total.double().mean() if is_total_read else 0) * y]

    for ours, theirs in zip(*both(run, [x, y]), strict=True):
        torch.testing.assert_close(ours, theirs)


class _Again(torch.autograd.Function):
    """Its backward calls the engine, as those do that run a forward again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        untyped: Any = torch.autograd
        with torch.enable_grad():
            return untyped.grad(x.sin(), x, gradients[0])[0]


def test_a_trace_never_starts_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory; how a custom function splits is seen on others."""
    runs: list[Any] = []
    graph: Any = torch.autograd.graph
    engine = graph._engine_run_backward

    def note(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if all(type(x) is Tensor for x in outputs):  # none is fake
            return engine(outputs, *args, **kwargs)
        runs.append(args)
        raise RuntimeError

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", note)
    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", note)
    loss = kept("kl_div", torch.randn(8, 8), torch.rand(8, 8), needs=(True, False))
    assert loss.temporaries.backward == 8 * 8 * 4
    untyped: Any = _Again
    trace_model(_Applies(untyped.apply), {"x": torch.randn(8, 8)})
    assert not runs


class _Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).mean()


def kept(target: str, *args: Any, needs: tuple[bool, ...]) -> Kept:
    op, tensors = as_op(sample(target, *args))
    return SavesMeter().saved(op, tuple(map(tensor_type, tensors)), (), needs)
