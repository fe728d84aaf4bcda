"""A backward in two parts gives what one backward gives, and runs nothing twice that communicates."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from autopar.lower.autograd import edge_of
from autopar.lower.program.split_backward import SplitBackward

RUNS: Counter[int] = Counter()


class Counted(torch.autograd.Function):
    """``x * weight``, counting its backward passes per thread, as a function that communicates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        RUNS[threading.get_ident()] += 1
        return gradient * weight, (gradient * x).sum(0)


class Stage(nn.Module):
    """Weights that branch off the way once, twice (one above the other), beside it, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.twice = nn.Linear(4, 4)
        self.scale, self.beside, self.counted = (nn.Parameter(torch.rand(4)) for _ in range(3))
        self.unread = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """Two inputs -> an output of both, one of neither."""
        x = torch.tanh(self.twice(self.first(x)))
        x = Counted.apply(x, self.counted.exp()) * self.scale.square()
        x = self.twice(x) + skip
        x = functional.silu(self.second(x)) * self.scale + self.twice.weight.sum()
        return x, Counted.apply(self.beside.exp()[None], self.beside).sum()


@pytest.fixture
def stage() -> Stage:
    torch.manual_seed(0)
    return Stage().double()


def leaves() -> list[Tensor]:
    return [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("given", [(0, 1), (0,), (1,)], ids=["both outputs", "one", "one of parameters alone"])
def test_both_parts_give_what_one_backward_gives(stage: Stage, given: tuple[int, ...]) -> None:
    inputs = leaves()
    outputs = stage(*inputs)
    gradients = [torch.rand_like(outputs[index]) for index in given]
    parameters = list(stage.parameters())
    expected = torch.autograd.grad(
        [outputs[i] for i in given], [*inputs, *parameters], gradients, allow_unused=True, retain_graph=True
    )
    whole = RUNS.pop(threading.get_ident(), 0)
    split = SplitBackward([edge_of(outputs[index]) for index in given], gradients, inputs, parameters)
    found = split.inputs()
    assert all(p.grad is None for p in parameters)
    split.parameters()
    assert RUNS.pop(threading.get_ident(), 0) == whole
    assert all(x.grad is None for x in inputs)
    for mine, wanted in zip([*found, *(p.grad for p in parameters)], expected, strict=True):
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted)


def test_gradients_of_microbatches_add_up(stage: Stage) -> None:
    parameters = [stage.first.weight, stage.twice.weight, stage.scale]
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for _ in range(2):
        inputs = leaves()
        output, _ = stage(*inputs)
        split = SplitBackward([edge_of(output)], [torch.ones_like(output)], inputs, list(stage.parameters()))
        split.inputs()
        split.parameters()
        wanted = torch.autograd.grad(stage(*inputs)[0].sum(), parameters)
        total = [a + b for a, b in zip(total, wanted, strict=True)]
    torch.testing.assert_close([parameter.grad for parameter in parameters], total)


def test_a_first_stage_does_everything_in_the_second_part(stage: Stage) -> None:
    output, _ = stage(*(x.detach() for x in leaves()))
    split = SplitBackward([edge_of(output)], [torch.ones_like(output)], [], list(stage.parameters()))
    assert split.inputs() == []
    split.parameters()
    assert stage.first.weight.grad is not None


def test_outputs_of_a_first_stage_are_differentiated_together() -> None:
    """What two of them share runs once."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 64, bias=False)
    shared = torch.tanh(linear(torch.randn(64, 64)))
    outputs = [shared.sin(), shared.cos()]
    split = SplitBackward([edge_of(x) for x in outputs], [torch.ones_like(x) for x in outputs], [], [linear.weight])
    split.inputs()
    with FlopCounterMode(display=False) as flops:
        split.parameters()
    assert flops.get_total_flops() == 2 * 64**3


def test_each_part_multiplies_once_per_product() -> None:
    """A linear layer's backward has a product in each part; for a weight that is used twice both are in the first."""
    torch.manual_seed(0)
    linears = [nn.Linear(64, 64, bias=False) for _ in range(3)]
    x = torch.randn(64, 64, requires_grad=True)
    output = x
    for linear in (*linears, linears[0]):  # 4 products for the input, 2 for weights of one use, 2 for the other
        output = torch.tanh(linear(output))
    split = SplitBackward([edge_of(output)], [torch.ones_like(output)], [x], [linear.weight for linear in linears])
    product = 2 * 64**3
    with FlopCounterMode(display=False) as first:
        split.inputs()
    with FlopCounterMode(display=False) as second:
        split.parameters()
    assert (first.get_total_flops(), second.get_total_flops()) == (6 * product, 2 * product)
