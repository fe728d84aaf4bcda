"""Operands of dtypes that an op's kernels refuse are found when a model is traced."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar.errors import ExampleInputsError
from autopar.trace import trace


class Integers(nn.Module):
    """Calls a function on an integer input."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.linear.weight.sum() + self.function(x).sum()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", lambda x: x.softmax(-1)),
        ("log_softmax", lambda x: functional.log_softmax(x, 1)),
        ("gelu", functional.gelu),
        ("silu", functional.silu),
        ("mish", functional.mish),
        ("softplus", functional.softplus),
        ("hardswish", functional.hardswish),
        ("hardsigmoid", functional.hardsigmoid),
        ("log_sigmoid", functional.logsigmoid),
        ("glu", functional.glu),
        ("rrelu", functional.rrelu),
        ("std", lambda x: x.std(1)),
        ("var", torch.var),
        ("cross_entropy_loss", lambda x: functional.cross_entropy(x, x.new_zeros(4))),
        ("scaled_dot_product_attention", lambda x: functional.scaled_dot_product_attention(x, x, x)),
    ],
)
def test_kernels_without_integers_are_found_when_tracing(name, function):
    x = torch.ones(4, 8, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        Integers(function)(x)
    for autocast in (None, torch.bfloat16):
        with pytest.raises(
            ExampleInputsError, match=rf"test_op_dtypes.py:.*{name} takes floating-point numbers, not int64"
        ):
            trace(Integers(function), (x,), {}, autocast=autocast)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_kernels_with_integers_raise_no_false_alarms(autocast):
    def every(x):
        kept = x.relu() + x.sigmoid() + x.abs() + x.cumsum(1)
        means = functional.mse_loss(x.float(), x) + functional.smooth_l1_loss(x.float(), x)
        return (
            kept
            + means
            + functional.softmax(x, -1, dtype=torch.float32)
            + x.log_softmax(-1, torch.float32)
            + functional.gelu(x.float())
        )

    x = torch.ones(4, 8, dtype=torch.int64)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        Integers(every)(x)
    assert trace(Integers(every), (x,), {}, autocast=autocast).program.outputs
