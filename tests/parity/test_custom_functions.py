"""Custom ``torch.autograd.Function`` in a model: its own backward runs, by every plan, and it splits where it can."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import TraceError
from autopar.ops import family_of
from autopar.placement import BROADCAST, REPLICATE
from autopar.program import Op, Program
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.trace import trace
from autopar.trace.annotations.discover import _aligned_candidates, _WholeRun
from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone


class Reverse(torch.autograd.Function):
    """Gradient reversal as domain adaptation writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].neg() * ctx.strength, None


class BloomGelu(torch.autograd.Function):
    """As Hugging Face's Bloom has it: a backward of its own, by the formula of the approximation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0]
        tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh)
        return slope * gradients[0]


class Quantized(torch.autograd.Function):
    """A linear layer with rounded weights, straight through: several tensors, results, and gradients on demand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, levels: int) -> tuple[Tensor, Tensor]:
        rounded = (weight * levels).round() / levels
        ctx.save_for_backward(x, rounded)
        ctx.has_bias = bias is not None
        code = (rounded * levels).long().sum(1)
        ctx.mark_non_differentiable(code)
        return functional.linear(x, rounded, bias), code

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, rounded = ctx.saved_tensors
        of_x = gradients[0] @ rounded if ctx.needs_input_grad[0] else None
        of_weight = gradients[0].flatten(0, -2).mT @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        of_bias = gradients[0].flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None


class Clipped(torch.autograd.Function):
    """Passes on gradients of a limited norm: its backward is not linear, and needs all of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        norm = gradients[0].norm()
        return gradients[0] * (1e-3 / norm).clamp(max=1.0)


class Doubled(Reverse):
    """With an inherited forward, and a backward of its own."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0], None


class Apart(torch.autograd.Function):
    """Forward and context in two functions."""

    @staticmethod
    def forward(x: Tensor, strength: float) -> Tensor:
        return x * strength

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.strength**2, None


# As most models name them: bound before anything is traced.
reverse, doubled, apart = Reverse.apply, Doubled.apply, Apart.apply


class Network(nn.Module):
    """A custom function between two linear layers."""

    def __init__(self, call: Callable[[Network, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.call = nn.Linear(8, 16), nn.Linear(16, 8), call

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, 8] -> a scalar."""
        return self.down(self.call(self, self.up(x))).square().mean()


CALLS: dict[str, Callable[[Network, Tensor], Tensor]] = {
    "reverse": lambda _, x: Reverse.apply(x, 0.5),
    "bound": lambda _, x: reverse(x, 0.5),
    "bound, inherited": lambda _, x: doubled(x, 0.5),
    "bound, context apart": lambda _, x: apart(x, 0.5),
    "gelu": lambda _, x: BloomGelu.apply(x),
    "quantized": lambda net, x: Quantized.apply(x, net.up.weight.mT, None, 16)[0] @ net.up.weight.mT,
    "clipped": lambda _, x: Clipped.apply(x),
}  # fmt: skip


def op_of(program: Program, name: str) -> Op:
    return next(op for layer in program.layers for op in layer.ops if name in op.target)


@cache
def subject_of(name: str) -> Subject:
    torch.manual_seed(0)
    return trained_alone(Network(CALLS[name]).double(), {"x": torch.randn(4, 4, 8).double()})


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("constraint", ["data=2", "tensor=2", "microbatches=2"])
def test_it_trains_as_on_one_device(name: str, constraint: str) -> None:
    who = subject_of(name)
    if (name, constraint) == ("clipped", "microbatches=2"):
        assert not isinstance(time_assignment(who.traced.program, 2), TimeAssignment)
        return
    plan = forced_plan(who.traced.program, 2, constraint)
    assert_parity(who, plan)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", range(3))
def test_it_trains_by_random_plans(name: str, seed: int) -> None:
    assert_parity(subject_of(name), random_plan(subject_of(name).traced.program, 4, seed))


def test_the_plan_says_how_it_runs() -> None:
    program = subject_of("reverse").traced.program
    assert any("Reverse_" in x and "with its own backward, and splits as running it" in x for x in program.notes)
    again = trace(Network(CALLS["reverse"]), (), {"x": torch.randn(4, 4, 8)}).program
    assert op_of(again, "Reverse_").target == op_of(program, "Reverse_").target


def test_a_backward_that_is_not_linear_gets_whole_gradients() -> None:
    linear = {x.factor: x for x in op_of(subject_of("reverse").traced.program, "Reverse_").options}
    assert {"x0d0", "x0d1", "x0d2"} <= linear.keys()
    assert linear["~"].operands == (BROADCAST,)
    clipped = {x.factor: x for x in op_of(subject_of("clipped").traced.program, "Clipped_").options}
    assert clipped.keys() == {"-", "~", "+"}
    assert clipped["~"].operands == (REPLICATE,)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0]


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x.data_ptr()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda _, x: InPlace.apply(x), "InPlace.* writes to its argument in place: .*new tensor"),
        (lambda net, x: Inside.apply(x, net.up), "Inside.* gets a Linear: pass tensors, numbers and text only"),
        (lambda _, x: Kernel.apply(x), r"Kernel.* runs a kernel .*custom_op.*register_fake"),
    ],
)
def test_what_an_op_can_not_carry_is_refused(call: Any, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        trace(Network(call), (), {"x": torch.randn(4, 4, 8)})


class Launcher:
    """Launches as Triton does: ``kernel[grid](...)``, with what is at the tensors' addresses."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(x: Tensor, y: Tensor) -> None:
            assert x.data_ptr()
            assert y.data_ptr()
            y.copy_(x.exp() - 1)

        return launch


class Launched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: str) -> Tensor:
        y = torch.empty_like(x)
        assert bool((x < 100).all())  # no condition on values decides about shapes
        KERNELS[kernel][(x.shape[0],)](x, y)
        ctx.scale = float(x.numel() / max(1, (x > -100).sum().item()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (ctx.saved_tensors[0] + 1) * ctx.scale, None


class WithLaunches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        function: Any = Launched
        return self.b(function.apply(self.a(x), "exp")).square().mean()


KERNELS = {"exp": Launcher()}


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Triton, which needs a GPU."""
    jit = SimpleNamespace(KernelInterface=Launcher)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(runtime=SimpleNamespace(jit=jit)))


@pytest.mark.usefixtures("triton")
def test_kernels_are_launched_with_values_only() -> None:
    torch.manual_seed(0)
    who = trained_alone(WithLaunches().double(), {"x": torch.randn(4, 6).double()})
    (op,) = (op for layer in who.traced.program.layers for op in layer.ops if "Launched" in op.target)
    assert op.target.startswith("autopar_launching.")
    assert family_of(op.target).runs_apart
    assert not any("is dropped" in note for note in who.traced.program.notes)
    for constraint in ("data=2", "tensor=2"):
        assert_parity(who, forced_plan(who.traced.program, 2, constraint))


class Shrunk(torch.autograd.Function):
    """All rows are smaller where one is very large, which no random numbers are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = 0.5 if (x.abs() > 100).any() else 1.0
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.scale


def test_conditions_are_asked_of_all_rows() -> None:
    x = torch.randn(4, 4, 8).double()
    x[0] *= 1e4
    who = trained_alone(Network(lambda _, x: Shrunk.apply(x)).double(), {"x": x})
    (op,) = (op for layer in who.traced.program.layers for op in layer.ops if "Shrunk" in op.target)
    assert {option.factor for option in op.options} <= {"-", "~", "+"}
    assert_parity(who, forced_plan(who.traced.program, 2, "data=2"))


@pytest.mark.usefixtures("triton")
def test_what_depends_on_values_is_refused() -> None:
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.new_ones((x > 0).sum().item(), 2)

    with pytest.raises(
        TraceError, match=r"Kept, a custom torch\.autograd\.Function, gives a tensor whose shape depends"
    ):
        trace(Network(lambda _, x: Kept.apply(x)), (torch.randn(4, 4, 8),), {})


def test_slices_of_what_launches_kernels_fit_together() -> None:
    def candidates(*shapes: tuple[int, ...], labels: int = 0) -> list[str]:
        operands = [torch.zeros(shape) for shape in shapes]
        operands += [torch.zeros(labels, dtype=torch.int64)] if labels else []
        found = _aligned_candidates(_WholeRun(list, tuple(operands), (), (), (), True, 0.0))
        return [" ".join(map(str, way)) for way in found]

    assert candidates((8, 16, 64), (64,)) == ["S(0) B", "S(1) B"]
    assert candidates((64, 16), (64,), labels=64) == ["S(0) B S(0)", "S(1) B B"]
    assert candidates((8, 4), (8, 4)) == ["S(0) S(0)", "S(1) S(1)"] * 2
