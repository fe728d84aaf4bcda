"""Checks that run on every rank of real processes, and what they compare with: the same model on one device.

Starting processes takes seconds, so a test launches several checks at once; a failure names the check.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import autopar
from autopar.lower import ParallelModule
from autopar.verify.rehearsal import loss_of
from tests import models
from tests.ranks import run_ranks

Check = partial[None] | FunctionType
LOSS_TOLERANCE = 1e-6  # of float32, relative
GRADIENT_TOLERANCE = 1e-4  # of float32, relative to the gradient's largest entry
STEPS = 3  # the second step reads what the first one updated, the third what an optimizer keeps of both


def launch(world: int, *checks: Check, timeout_s: float = 400) -> None:
    """Run `checks` one after the other on each of `world` gloo processes.

    Raises:
        RanksError: one failed or hung; the message names it.
    """
    taken_s = run_ranks(run_checks, world, checks, timeout_s=timeout_s)[0]
    print("\n".join(f"{seconds:5.1f} s {name}" for name, seconds in taken_s.items()))


def run_checks(checks: Sequence[Check]) -> dict[str, float]:
    """On a rank: the seconds that each check took."""
    torch.set_num_threads(1)
    taken_s: dict[str, float] = {}
    for check in checks:
        name = f"{check.func.__name__}{check.args}" if isinstance(check, partial) else check.__name__
        torch.manual_seed(0)
        started = time.perf_counter()
        try:
            check()
        except BaseException as error:
            error.add_note(f"in the check {name} on rank {dist.get_rank()}")
            raise
        taken_s[name] = time.perf_counter() - started
    return taken_s


def whole_mesh() -> DeviceMesh:
    """All processes as one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def parallelize(model: nn.Module, inputs: Any, /, **kwargs: Any) -> ParallelModule:
    """`autopar.parallelize` on all processes, with estimated prices: measuring takes seconds."""
    kwargs.setdefault("profile", False)
    return autopar.parallelize(model, whole_mesh(), inputs, **kwargs)


def make(name: str, dtype: torch.dtype = torch.float32) -> models.Model:
    """A model of the zoo."""
    return models.make(name, dtype)


def whole(value: Any) -> Any:
    """`value` with every DTensor as the plain whole tensor; every rank must call it."""
    return tree_map_only(DTensor, lambda x: x.full_tensor(), value)


def error_of(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest entry of `expected` (or `floor` if larger)."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if not expected.numel():
        return 0.0
    scale = max(expected.abs().max().item(), floor)
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / scale if scale else difference


def assert_near(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, floor: float = 0.0
) -> None:
    """Every entry within `tolerance` of the largest one of its tensor.

    `floor` is a share of the largest entry of all: what should be smaller than that holds only rounding.
    """
    assert list(found) == list(expected)
    largest = max((x.abs().max().item() for x in expected.values() if x.numel()), default=0.0)
    errors = {name: error_of(found[name], expected[name], floor * largest) for name in expected}
    name = max(errors, key=lambda n: errors[n])
    assert errors[name] <= tolerance, (
        f"{name} differs by {errors[name]:.1e} of its largest entry, allowed {tolerance:.0e}"
    )


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by parameter name."""
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and buffers by name."""
    if isinstance(model, ParallelModule):
        return model.full_state_dict()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def loss_without_gradients(model: nn.Module, inputs: Mapping[str, Any]) -> float:
    """The first scalar that the model returns."""
    with torch.no_grad():
        leaves = tree_leaves(model(**inputs))
    return next(x for x in leaves if isinstance(x, Tensor) and x.dim() == 0).item()


def run_step(model: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Forward and backward; the loss."""
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.item()


def assert_same_step(
    parallel: nn.Module,
    single: nn.Module,
    inputs: Mapping[str, Any],
    loss_tolerance: float = LOSS_TOLERANCE,
    gradient_tolerance: float = GRADIENT_TOLERANCE,
) -> None:
    """One forward and backward of both, compared; gradients stay for what comes next."""
    parallel.zero_grad()
    single.zero_grad()
    expected, found = run_step(single, inputs), run_step(parallel, inputs)
    assert abs(found - expected) <= loss_tolerance * abs(expected), (found, expected)
    assert_near(gradients_of(parallel), gradients_of(single), gradient_tolerance, floor=1e-2)


MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# With a usual eps Adam would blow rounding noise, of a gradient that is exactly zero, up to whole steps.
OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-4, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-4, foreach=False),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9, weight_decay=1e-2),
}


def steps(optimizer: torch.optim.Optimizer, count: int, compute: Callable[[], Tensor]) -> list[float]:
    """The usual loop around the loss that `compute` gives; the loss of every step."""
    losses: list[float] = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = compute()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Mapping[str, Any], count: int) -> list[float]:
    """`steps` of a model with its loss inside."""
    return steps(optimizer, count, lambda: loss_of(model(**inputs)))


def train(model: nn.Module, inputs: Mapping[str, Any], make_optimizer: MakeOptimizer) -> list[float]:
    """`STEPS` of them with a new optimizer."""
    return train_on(model, make_optimizer(model.parameters()), inputs, STEPS)


def assert_same_training_by_outside_loss(parallel: ParallelModule, single: nn.Module, x: Tensor, y: Tensor) -> None:
    """`STEPS` of both, with a loss that the user computes from their outputs, logits and features."""

    def loss_from(model: nn.Module) -> Tensor:
        logits, features = model(x)
        return functional.cross_entropy(logits, y) + 0.1 * features.square().mean()

    wanted, got = (
        steps(OPTIMIZERS["adamw foreach"](model.parameters()), STEPS, partial(loss_from, model))
        for model in (single, parallel)
    )
    for a, b in zip(wanted, got, strict=True):
        assert abs(a - b) < 1e-5 * abs(a)
    assert wanted[-1] < wanted[0]
    assert_near(state_of(parallel), state_of(single), 1e-4, floor=1e-2)


def assert_same_training(
    parallel: ParallelModule, single: nn.Module, inputs: Mapping[str, Any], make_optimizer: MakeOptimizer
) -> None:
    """`STEPS` of both from the same state, compared."""
    expected, found = copy.deepcopy(single), parallel
    found.load_state_dict(expected.state_dict())
    before = state_of(expected)
    wanted, got = (train(model, inputs, make_optimizer) for model in (expected, found))
    for a, b in zip(wanted, got, strict=True):
        assert abs(a - b) <= 1e-5 * abs(a), (wanted, got)
    after = state_of(expected)
    moved = max((after[n] - before[n]).abs().max().item() for n in after if after[n].is_floating_point())
    assert moved > 1e-2, "the training is to move parameters by more than the tolerance"
    assert_near(state_of(found), after, 1e-4, floor=1e-2)
