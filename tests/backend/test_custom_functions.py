"""``torch.compile(backend="autopar")`` of models with custom ``torch.autograd.Function``s."""

from __future__ import annotations

import copy
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.wrap import wrap  # pyright: ignore
from torch.utils.checkpoint import checkpoint

from autopar.errors import TraceError
from autopar.trace.export import captured_graphs
from tests.backend import models
from tests.backend.models import compile_for, differences, make_mesh, vector_batches
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


class Reversed(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return -ctx.scale * gradients[0], None


class Swish(torch.autograd.Function):
    """Keeps its argument, and a result that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        ctx.mark_non_differentiable(gate)
        return x * gate, gate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        return gradients[0] * (gate + x * gate * (1 - gate))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = Swish.apply(Reversed.apply(self.up(x), 0.5))  # pyright: ignore[reportGeneralTypeIssues]
        return x + self.down(h * gate)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        result: Any = checkpoint(self.blocks[-1], x, use_reentrant=False)
        return result


def train() -> tuple[dict[str, dict[str, float]], int, list[float], str]:
    mesh = make_mesh()
    found = {
        text: differences(Blocks, vector_batches, models.loss_outside, mesh, text) for text in ("data=2", "tensor=2")
    }
    torch._dynamo.reset()
    model = Blocks()
    single = copy.deepcopy(model)
    compiled = compile_for(model, mesh, shard=True)
    apart: list[float] = []
    for x in vector_batches():
        expected, loss = single(x).square().mean(), compiled(x).square().mean()
        apart.append(abs(expected.item() - loss.item()))
        expected.backward()
        loss.backward()
    gradients = zip(model.parameters(), single.parameters(), strict=True)
    apart += [(p.grad.full_tensor() - q.grad).abs().max().item() for p, q in gradients]  # pyright: ignore
    torch._dynamo.reset()
    with pytest.raises(TraceError) as caught:
        compile_for(lambda x: wrap(lambda y: Reversed.apply(y, 0.5), model(x)), mesh)(torch.ones(4, 8))
    return found, len(captured_graphs._FUNCTIONS), apart, str(caught.value)


def test_they_train_as_on_one_device() -> None:
    for found, count, apart, said in run_ranks(train, 2, timeout_s=300):
        for each in found.values():
            assert each["moved"] > 1e-3, "nothing was trained"
            assert max(each["loss"], each["gradients"], each["parameters"]) < 2e-6
        assert count == 2  # calls in all blocks, and in another trace, are calls of the same functions
        assert max(apart) < 2e-6
        assert "test_custom_functions.py:" in said
        assert "a custom torch.autograd.Function in a graph inside of Dynamo's" in said


class Scaled(torch.autograd.Function):
    """Fails on some slices of its operands, as it is tried on them."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).sum(0)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(8, 16), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        result: Any = Scaled.apply(self.up(x), self.scale)
        return result


def train_quietly() -> tuple[str, dict[str, float]]:
    printed = StringIO()
    with redirect_stderr(printed):
        found = differences(Scaling, vector_batches, models.loss_outside, make_mesh(), "data=2")
    return printed.getvalue(), found


def test_nothing_is_printed_where_slices_are_tried() -> None:
    for printed, found in run_ranks(train_quietly, 2):
        assert "FX-traced" not in printed
        assert max(found["loss"], found["gradients"], found["parameters"]) < 2e-6
