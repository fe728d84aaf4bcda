"""What loops in Python read and write one entry at a time is one op each, with the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.trace import trace
from tests.trace.interpreter import check_equals_model

STEPS = 6


def scan(x: Tensor) -> Tensor:
    """A state over time, as models with linear attention compute it."""
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for step in range(x.shape[1]):
        state = state * x[:, step].sigmoid() + x[:, step]
        out[:, step] = state.tanh()
    return out


def backwards(x: Tensor) -> Tensor:
    out, state = x.new_empty(x.shape), x[:, -1]
    for step in reversed(range(x.shape[1])):
        state = state + x[:, step - x.shape[1]]
        out[:, step] = state
    return out


def through_what_it_writes(x: Tensor) -> Tensor:
    """Each entry from the one before, which is read from the tensor that it was written to."""
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    for step in range(1, x.shape[1]):
        out[:, step] = out[:, step - 1] * 0.5 + x[:, step]
    return out


def adding(x: Tensor) -> Tensor:
    out = torch.ones_like(x)
    for step in range(x.shape[1]):
        out[:, step] += x[:, step]
    return out


def twice(x: Tensor) -> Tensor:
    """Entries are overwritten."""
    out = torch.zeros_like(x)
    for factor in (2.0, 3.0):
        for step in range(x.shape[1]):
            out[:, step] = x[:, step] * factor
    return out


def but_the_first(x: Tensor) -> Tensor:
    out = x.cos()
    for step in range(1, x.shape[1]):
        out[:, step] = x[:, step] - x[:, step - 1]
    return out


def last_dim(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for step in range(x.shape[-1]):
        out[..., step] = x[..., step].exp()
    return out


def samples(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row in range(len(x)):
        out[row] = x[row].sin()
    return out


def a_few(x: Tensor) -> Tensor:
    """Fewer than half."""
    out = torch.zeros_like(x)
    out[:, 1], out[:, 2] = x[:, 3], x[:, 4]
    return out


def wider(x: Tensor) -> Tensor:
    """What is written has another dtype than what it is written to."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for step in range(x.shape[1]):
        out[:, step] = x[:, step].half().sin()
    return out.to(x.dtype)


def read_between(x: Tensor) -> Tensor:
    """All of what was written so far is read in each step."""
    out = torch.zeros_like(x)
    for step in range(x.shape[1]):
        out[:, step] = x[:, step] + out.sum(1)
    return out


def two_dims(x: Tensor) -> Tensor:
    """Writes along one dim after writes along another."""
    out = torch.zeros_like(x)
    for step in range(x.shape[1]):
        out[:, step] = x[:, step]
    for column in range(3):
        out[:, :, column] = x[:, :, column + 1]
    return out


def two_slices_then_entries(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :2], out[:, 2:] = x[:, 4:], x[:, :4]
    out[:, 3] = x[:, 0]
    return out


def slices(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for start in range(0, x.shape[1], 2):
        out[:, start : start + 2] = x[:, start : start + 2].cumsum(1)
    return out


SELECT, UNBIND = "aten.select.int", "aten.unbind.int"
WRITE, WRITE_SLICE, STACK, CAT = (
    "aten.select_scatter.default",
    "aten.slice_scatter.default",
    "aten.stack.default",
    "aten.cat.default",
)
TARGETS = {SELECT, UNBIND, WRITE, WRITE_SLICE, STACK, CAT}

LOOPS: dict[Callable[[Tensor], Tensor], dict[str, int]] = {
    scan: {UNBIND: 1, STACK: 1},
    backwards: {UNBIND: 1, STACK: 1},
    through_what_it_writes: {UNBIND: 1, STACK: 1},
    adding: {UNBIND: 2, STACK: 1},  # of what it adds to, too
    twice: {UNBIND: 1, STACK: 1},
    but_the_first: {UNBIND: 1, STACK: 1, SELECT: 1},
    last_dim: {UNBIND: 1, STACK: 1},
    samples: {UNBIND: 1, STACK: 1},
    a_few: {SELECT: 2, WRITE: 2},
    wider: {UNBIND: 1, STACK: 1},
    read_between: {UNBIND: 1, WRITE: STEPS},
    two_dims: {UNBIND: 1, STACK: 1, SELECT: 3, WRITE: 3},
    two_slices_then_entries: {CAT: 1, SELECT: 1, WRITE: 1},
    slices: {CAT: 1},
}


class Loop(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.slow_after(9)
@pytest.mark.parametrize("function", LOOPS, ids=lambda each: each.__name__)
def test_a_loop_is_one_op_for_all_that_it_reads_and_one_for_all_that_it_writes(
    function: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    traced = check_equals_model(Loop(function), {"x": torch.randn(4, STEPS, 8)}, training=True)
    targets = Counter(op.target for layer in traced.program.layers for op in layer.ops)
    assert {target: count for target, count in targets.items() if target in TARGETS} == LOOPS[function]


class StackedWeights(nn.Module):
    """The weights of its layers are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(STEPS, 8, 8) / 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in range(STEPS):
            x = (x @ self.weight[layer]).relu()
        return x


def test_weights_of_one_parameter_are_read_where_their_layer_runs() -> None:
    traced = check_equals_model(StackedWeights(), {"x": torch.randn(4, 8)}, training=True)
    targets = Counter(op.target for layer in traced.program.layers for op in layer.ops)
    assert targets[SELECT] == STEPS
    assert not targets[UNBIND]


def test_iterations_of_a_long_loop_are_layers_of_one_kind() -> None:
    """So that a search costs no more for a loop of twice the steps."""
    counts = {}
    for steps in (64, 128):
        layers = trace(Loop(scan), (torch.randn(4, steps, 8),), {}).program.layers
        counts[steps] = len({layer.kind for layer in layers})
        assert len(layers) > steps / 32
    assert counts[64] == counts[128] <= 4
