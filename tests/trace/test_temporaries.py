"""Temporaries of calls that run as other ops, and of custom functions, are counted when they are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.planning.call_traces import trace_model
from autopar.program import Op
from autopar.trace.annotations.saves import Kept, SavesMeter
from tests.ops.harness import as_op, sample, tensor_type

ROWS, WIDTH = 32, 64


def kept(target: str, *args: Any, needs: tuple[bool, ...]) -> Kept:
    op, tensors = as_op(sample(target, *args))
    types = tuple(map(tensor_type, tensors))
    return SavesMeter().saved(op, types, (), needs)


def test_a_divergence_has_three_tensors_at_once() -> None:
    # sum(xlogy(target, target) - target * x): the terms and their difference, of which the sum alone is a result.
    x, target = torch.randn(ROWS, WIDTH), torch.rand(ROWS, WIDTH)
    assert kept("kl_div", x, target, 2, needs=(True, False)).temporaries.forward == 3 * x.nbytes - 4


def test_products_have_no_temporaries() -> None:
    x, weight, bias = torch.randn(ROWS, 8, WIDTH), torch.randn(16, WIDTH), torch.randn(16)
    assert kept("linear", x, weight, bias, needs=(True, True, True)).temporaries == (0, 0)


def test_kernels_of_torch_are_not_counted() -> None:
    assert kept("square", torch.randn(ROWS, WIDTH), needs=(True,)).temporaries == (0, 0)  # its record says it


def test_the_backward_of_an_op_without_a_record_is_counted() -> None:
    # grad / exp(x^2 / 2 + log_ndtr(x)) / sqrt(2 pi): three tensors behind one another besides the gradient.
    x = torch.randn(ROWS, WIDTH)
    assert kept("special_log_ndtr", x, needs=(True,)).temporaries.backward >= 2 * x.nbytes


@pytest.mark.parametrize(("how", "count"), [("amax", 6), ("prod", 10)])
def test_the_backward_of_a_reducing_scatter_is_counted(how: str, count: int) -> None:
    x, index = torch.rand(ROWS, WIDTH), torch.randint(ROWS, (ROWS, WIDTH))
    found = kept("scatter_reduce.two", x, 0, index, x.clone(), how, needs=(True, False, True))
    assert found.temporaries.backward >= count * x.nbytes


def test_a_norm_saves_no_wide_copy_where_one_kernel_runs_it() -> None:
    x, weight = torch.randn(ROWS, WIDTH).bfloat16(), torch.ones(WIDTH).bfloat16()
    assert kept("rms_norm", x, (WIDTH,), weight, needs=(True, True)) == Kept((0, 1), 4 * ROWS)


def test_a_norm_with_a_weight_of_another_dtype_runs_as_several_ops() -> None:
    x, weight = torch.randn(ROWS, WIDTH).bfloat16(), torch.ones(WIDTH)
    assert kept("rms_norm", x, (WIDTH,), weight, needs=(True, True)).extra_bytes > 2 * x.nbytes


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        slope = 1 + x * (1 - gate)
        return gradients[0] * gate * slope


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        untyped: Any = _Gate
        y: Tensor = untyped.apply(self.linear(x))
        return functional.mse_loss(y, x)


def test_a_custom_function_is_counted() -> None:
    traced = trace_model(_Gated(), {"x": torch.randn(ROWS, WIDTH)})
    ops: list[Op] = [op for layer in traced.program.layers for op in layer.ops if "_Gate" in op.target]
    assert len(ops) == 1
    forward, backward = ops[0].temporary_bytes
    assert (forward, backward) == (ROWS * WIDTH * 4, 3 * ROWS * WIDTH * 4)
