"""Optimizers that don't work element by element train cut parameters as one device does; those that do are let be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from autopar.errors import OptimizerError
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.parameters.whole_matrices import works_on_slices
from autopar.trace import Traced, trace
from tests.lower.runs import build
from tests.zoo import forced_plan

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class PerParameter(Optimizer):
    """What small optimizers from packages have in common: a loop over groups and parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, p.grad, self.state[p]), alpha=-group["lr"])

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lion(PerParameter):
    """By element: the sign of an average."""

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(p)
        update = state["exp_avg"].mul(0.9).add(grad, alpha=0.1).sign()
        state["exp_avg"].lerp_(grad, 0.01)
        return update


class Lamb(PerParameter):
    """Adam, in steps as large as the parameter."""

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if "m" not in state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad * grad, 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-6)
        return update * p.norm() / update.norm()


class Shampoo(PerParameter):
    """A preconditioner on each side of a matrix."""

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return grad
        if not state:
            state["left"], state["right"] = (1e-3 * torch.eye(n, dtype=p.dtype) for n in p.shape)
            state["momentum"] = torch.zeros_like(p)
        state["left"] += grad @ grad.mT
        state["right"] += grad.mT @ grad
        state["momentum"].mul_(0.9).add_(self.root(state["left"]) @ grad @ self.root(state["right"]))
        return state["momentum"]

    @staticmethod
    def root(x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(x)
        return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.mT


class Soap(PerParameter):
    """Adam in the eigenbasis of Shampoo's preconditioners."""

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if p.dim() != 2:
            return grad
        if not state:
            state["gg"] = [torch.zeros(n, n, dtype=p.dtype) for n in p.shape]
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["gg"][0].lerp_(grad @ grad.mT, 0.05)
        state["gg"][1].lerp_(grad.mT @ grad, 0.05)
        # The signs of eigenvectors are arbitrary, and cancel.
        left, right = (torch.linalg.eigh(x + 1e-9 * torch.eye(len(x), dtype=x.dtype))[1] for x in state["gg"])
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_((left.mT @ grad @ right) ** 2, 0.05)
        return left @ ((left.mT @ state["m"] @ right) / (state["v"].sqrt() + 1e-4)) @ right.mT


class MuonAndAdam(PerParameter):
    """As its authors mix them: what a parameter is treated by is part of its state from the beginning."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for p in self.param_groups[0]["params"]:
            self.state[p]["use_muon"] = p.dim() == 2

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state["use_muon"]:
            return grad.sign()
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        x = state["momentum"].mul_(0.95).add_(grad)
        x = x / x.norm()
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        return x


class PlainLion(Lion):
    """By kernels of its own, which take plain tensors."""

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if isinstance(p, DTensor):
            raise RuntimeError("got mixed torch.Tensor and DTensor")
        return super().direction(p, grad, state)


class IdleLion(Lion):
    """By kernels that do nothing to DTensors, as those of packages that write to copies."""

    def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        made = super().direction(p, grad, state)
        return made * 0 if isinstance(p, DTensor) else made


class Lookahead(Optimizer):
    """Makes its steps by another optimizer, and then goes half of the way from where it was before."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state
        self.defaults = {"slow_steps": 1, **inner.defaults}  # of which the groups of the inner one know nothing

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step."""
        every = [p for group in self.param_groups for p in group["params"]]
        for p in every:
            self.state[p].setdefault("slow", p.detach().clone())
        self.inner.step(closure)
        for p in every:
            slow = self.state[p]["slow"]
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


def matrices_and_rest(params: Iterable[nn.Parameter]) -> list[Any]:
    return [p for p in params if p.dim() == 2]


MAKE: dict[str, Make] = {
    "torch's Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "Hugging Face's Adafactor": lambda params: HuggingFaceAdafactor(params),
    "Adafactor with momentum": lambda params: HuggingFaceAdafactor(
        params, lr=1e-2, relative_step=False, beta1=0.9, scale_parameter=False
    ),
    "torch's Muon": lambda params: torch.optim.Muon(matrices_and_rest(params), lr=1e-2),
    "Muon": MuonAndAdam,
    "LAMB": Lamb,
    "Shampoo": Shampoo,
    "SOAP": Soap,
    "Lion": Lion,
    "Lion of plain tensors": PlainLion,
    "Lion that passes DTensors by": IdleLion,
    "Lookahead of LAMB": lambda params: Lookahead(Lamb(params)),
    "Lookahead of SGD": lambda params: Lookahead(torch.optim.SGD(params, lr=1e-2)),
}


class Network(nn.Module):
    """Two layers with a normalization, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> a scalar."""
        return self.down(self.norm(self.up(x)).relu()).square().mean()


@cache
def traced() -> tuple[nn.Module, Tensor, Traced]:
    torch.manual_seed(0)
    model, x = Network().double(), torch.randn(8, 8, dtype=torch.float64)
    return model, x, trace(model, (), {"x": x})


def train(model: nn.Module, x: Tensor, make: Make) -> Optimizer:
    """Three steps."""
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(x=x).backward()
        optimizer.step()
    return optimizer


def names_of_state(optimizer: Optimizer) -> list[list[str]]:
    return [list(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


def by_rank(constraints: tuple[str, ...], run: Callable[[Any, Tensor], Any]) -> list[Any]:
    model, x, result = traced()
    plan = forced_plan(result.program, 2, *constraints)

    def rank(communicator: Communicator) -> Any:
        return run(build(model, result, plan, communicator), x)

    return simulate(2, rank)


@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        *((name, ("data=2", "zero=3")) for name in MAKE),
        *zip(MAKE, itertools.cycle([("data=2", "zero=0"), ("data=2", "zero=1"), ("tensor=2",)])),
    ],
)
def test_it_trains_as_on_one_device(name: str, constraints: tuple[str, ...]) -> None:
    model, x, _ = traced()
    alone = copy.deepcopy(model)
    expected = train(alone, x, MAKE[name])

    def run(parallel: Any, x: Tensor) -> Any:
        optimizer = train(parallel, x, MAKE[name])
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        state = [entry for p in optimizer.param_groups[0]["params"] for entry in optimizer.state[p].values()]
        shapes = [tuple(p.shape) for p in parallel.parameters()]
        kept = [entry for entry in state if isinstance(entry, Tensor) and tuple(entry.shape) in shapes]
        return parallel.full_state_dict(), names_of_state(optimizer), kept

    for found, state, kept in by_rank(constraints, run):
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
        assert state == names_of_state(expected)
        cut = [entry for entry in kept if isinstance(entry, DTensor) and entry.to_local().shape != entry.shape]
        assert cut or constraints[-1] == "zero=0" or name in ("torch's Adafactor", "Hugging Face's Adafactor")


@pytest.mark.parametrize("name", ["torch's Muon", "Lion", "SOAP"])
def test_it_trains_with_a_scheduler_and_hooks_as_on_one_device(name: str) -> None:
    """A scheduler replaces ``step`` of the optimizer itself, and begins at a rate of zero; hooks run once per step."""
    model, x, _ = traced()

    def train_scheduled(model: Any, x: Tensor) -> tuple[Any, int]:
        calls: list[Optimizer] = []
        optimizer = MAKE[name](model.parameters())
        optimizer.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.5 * number)
        for _ in range(3):
            optimizer.zero_grad()
            model(x=x).backward()
            optimizer.step()
            scheduler.step()
        assert all(each is optimizer for each in calls)
        return getattr(model, "full_state_dict", model.state_dict)(), len(calls)

    expected, count = train_scheduled(copy.deepcopy(model), x)
    for found, calls in by_rank(("data=2", "zero=3"), train_scheduled):
        assert calls == count == 3
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def test_a_loaded_state_without_settings_is_refused() -> None:
    """As `set_optimizer_state_dict` leaves it where the list of groups that was saved has other names, with stages."""

    def run(parallel: Any, x: Tensor) -> None:
        optimizer = train(parallel, x, torch.optim.AdamW)
        groups = [{"params": group["params"]} for group in optimizer.state_dict()["param_groups"]]
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
        with pytest.raises(OptimizerError, match=r"AdamW has no lr, betas.*flatten_optimizer_state_dict=True"):
            optimizer.step()

    by_rank(("data=2", "zero=3"), run)


def test_which_need_whole_parameters() -> None:
    matrix, bias = torch.empty(16, 32), torch.empty(16)

    def by_element(like: Tensor, dims: tuple[int, ...]) -> list[str]:
        return [name for name, make in MAKE.items() if works_on_slices(lambda p: make([p]), like, dims)]  # noqa: B023

    lions = ["Lion", "Lion of plain tensors", "Lion that passes DTensors by"]
    assert by_element(matrix, (0, 1)) == [*lions, "Lookahead of SGD"]
    assert by_element(bias, (0,)) == ["Muon", "Shampoo", "SOAP", *lions, "Lookahead of SGD"]
    for kind in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.SGD):
        assert works_on_slices(lambda p, kind=kind: kind([p]), matrix, (0, 1))


def test_a_trial_leaves_the_random_generator_as_it_was() -> None:
    class Noisy(PerParameter):
        def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
            return grad + torch.randn(p.shape)

    torch.manual_seed(3)
    assert not works_on_slices(lambda p: Noisy([p]), torch.empty(4, 4), (0,))
    found = torch.rand(1)
    torch.manual_seed(3)
    assert found == torch.rand(1)


def test_a_closure_is_refused() -> None:
    def run(parallel: Any, x: Tensor) -> str:
        optimizer = train(parallel, x, Lamb)
        with pytest.raises(OptimizerError, match=r"Lamb needs whole parameters.*step\(\) without a closure") as caught:
            optimizer.step(lambda: parallel(x=x))
        return str(caught.value)

    assert len(by_rank(("data=2", "zero=3"), run)) == 2


def test_a_closure_is_let_be_where_nothing_is_cut() -> None:
    """The more so where a step needs one."""

    class Sharpness(Lion):
        def step(self, closure: Any = None) -> None:
            assert closure is not None
            super().step(closure)

    def run(parallel: Any, x: Tensor) -> bool:
        optimizer = Sharpness(parallel.parameters())
        optimizer.step(lambda: parallel(x=x).backward())
        return all(isinstance(p, DTensor) and p.grad is not None for p in optimizer.param_groups[0]["params"])

    assert by_rank(("data=2", "zero=0"), run) == [True, True]


def test_a_step_that_failed_leaves_the_parameters() -> None:
    class Failing(Lamb):
        def direction(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
            if p.shape == (8, 16) and "again" not in self.__dict__:
                self.again = True
                raise RuntimeError("once")
            return super().direction(p, grad, state)

    def run(parallel: Any, x: Tensor) -> bool:
        optimizer = Failing(parallel.parameters())
        parallel(x=x).backward()
        with pytest.raises(RuntimeError, match="once"):
            optimizer.step()
        optimizer.step()
        return all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])

    assert by_rank(("data=2", "zero=3"), run) == [True, True]


@pytest.mark.parametrize("constraints", [("data=2", "zero=0"), ("data=2", "zero=3"), ("tensor=2",)])
@pytest.mark.parametrize("package", ["torchao.optim", "bitsandbytes.optim"])
def test_eight_bits(package: str, constraints: tuple[str, ...]) -> None:
    """In their blocks, which are those of whole parameters wherever a rank's part is no run of whole blocks."""
    kind = pytest.importorskip(package).AdamW8bit
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(8, 64)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

    alone = Loss()
    result = trace(copy.deepcopy(alone), (), {"x": x})
    plan = forced_plan(result.program, 2, *constraints)
    start = copy.deepcopy(alone)
    train(alone, x, lambda params: kind(params, lr=1e-2))

    def rank(communicator: Communicator) -> Any:
        parallel = build(start, result, plan, communicator)
        train(parallel, x, lambda params: kind(params, lr=1e-2))
        return parallel.full_state_dict()

    for found in simulate(2, rank):
        for name, value in alone.state_dict().items():
            error = (found[name] - value).abs()
            # Gradients differ in their last bit, so that a state may be rounded to the next of its 256 values.
            assert error.mean() <= 1e-6, name
            assert error.max() <= 1e-3, name
