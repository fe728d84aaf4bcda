"""Train a model by a plan on simulated ranks and on one device, and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.lower import Executable, ParallelModule, lower
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.compat import make_mesh
from autopar.plan import Plan
from autopar.trace import Traced
from autopar.verify.rehearsal import SteadyAdamW, keep_double_program, planner_for, run_single
from tests.zoo import forced_plan


@dataclass(frozen=True)
class Run:
    """Losses of every step; gradients of the first; parameters and buffers at the end; all whole."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    state: Mapping[str, Tensor]


def build(model: nn.Module, traced: Traced, plan: Plan, communicator: Communicator, **kwargs: Any) -> ParallelModule:
    """Lower for one simulated rank."""
    world = communicator.world_size
    mesh = make_mesh((world,), range(world), "cpu", rank=communicator.rank)
    return lower(executable(traced, plan), module=model, communicator=communicator, mesh=mesh, **kwargs)


def executable(traced: Traced, plan: Plan) -> Executable:
    """What `lower` takes."""
    return Executable(
        traced.program, plan, traced.constants, traced.flatten_inputs, traced.unflatten_outputs,
        questions=traced.questions, outside=traced.outside,
    )  # fmt: skip


def loss_of(output: Any) -> Tensor:
    """The scalar of an output, or a scalar made of all of it."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    scalars = [x for x in leaves if x.dim() == 0]
    return scalars[0] if scalars else torch.stack([x.square().mean() for x in leaves]).sum()


def whole_gradients(made: ParallelModule) -> dict[str, Tensor]:
    """The gradients that parameters have; all ranks call it."""
    return {name: made._whole(name, p.grad) for name, p in made.named_parameters() if p.grad is not None}


def losses_and_gradients(
    made: ParallelModule, batches: Iterable[Mapping[str, Any]]
) -> list[tuple[float, dict[str, Tensor]]]:
    """Those of each batch, without steps in between."""
    found: list[tuple[float, dict[str, Tensor]]] = []
    for batch in batches:
        loss = loss_of(made(**batch))
        loss.backward()
        found.append((loss.item(), whole_gradients(made)))
        made.zero_grad()
    return found


def assert_losses_and_gradients(
    steps: Iterable[tuple[float, Mapping[str, Tensor]]],
    alone: Iterable[Any],
    *,
    loss: float = 1e-12,
    gradient: float = 1e-9,
) -> None:
    """Those of each batch are those of a run alone, within relative errors; gradients relative to the largest entry."""
    for (found, gradients), expected in zip(steps, alone, strict=True):
        assert found == pytest.approx(expected.losses[0], rel=loss)
        largest = max(float(x.abs().max()) for x in expected.gradients.values())
        for name, x in expected.gradients.items():
            torch.testing.assert_close(gradients[name], x, rtol=0, atol=gradient * largest)


def assert_batches_train_alone(
    model: nn.Module,
    traced: Traced,
    batches: Sequence[Mapping[str, Any]],
    ranks: int,
    constraints: Sequence[str],
    *,
    num_plans: int,
) -> None:
    """On simulated ranks each batch has the loss and gradients of one device, and they have so many plans together.

    `traced` is in float64, of the first of them.
    """
    plan = forced_plan(traced.program, ranks, *constraints)
    planner = planner_for(model, traced, plan, batches[1:], keep_double_program, training=True)
    alone = [run_single(model, batch, 1, in_double=True) for batch in batches]

    def rank(talk: Communicator) -> tuple[list[tuple[float, dict[str, Tensor]]], int]:
        made: Any = build(model, traced, plan, talk, planner=planner)
        return losses_and_gradients(made, batches), len(made.plans)

    for steps, found in simulate(ranks, rank):
        assert_losses_and_gradients(steps, alone)
        assert found == num_plans


def train_single(
    model: nn.Module,
    inputs: Mapping[str, Any],
    steps: int = 2,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = SteadyAdamW,
) -> Run:
    """Train a copy on one device."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(**inputs))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Run(tuple(losses), gradients, {n: x.detach().clone() for n, x in model.state_dict().items()})


def train_parallel(
    model: nn.Module, traced: Traced, plan: Plan, inputs: Mapping[str, Any], steps: int = 2
) -> list[Run]:
    """Train on simulated ranks; one run per rank."""

    def rank(communicator: Communicator) -> Run:
        parallel = build(model, traced, plan, communicator)
        optimizer = SteadyAdamW([p for p in parallel.parameters() if p.requires_grad])
        losses, gradients = [], {}
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(parallel(**inputs))
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                gradients = whole_gradients(parallel)
            optimizer.step()
        return Run(tuple(losses), gradients, parallel.full_state_dict())

    return simulate(plan.world_size, rank)


def assert_same(expected: Run, found: Run, tolerance: float = 1e-9) -> None:
    """Loss within `tolerance` / 1000 relative, gradients within it relative to their largest entry, state
    within 1e-7.

    A gradient that is zero but for rounding (of a bias before a norm) is measured against the largest of all.
    """
    for a, b in zip(expected.losses, found.losses, strict=True):
        assert abs(a - b) <= tolerance / 1000 * max(abs(a), 1e-3), (expected.losses, found.losses)
    assert expected.gradients.keys() == found.gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        scale = max(gradient.abs().max().item(), 1e-5 * largest)
        error = (gradient - found.gradients[name]).abs().max().item()
        assert error <= tolerance * scale, (name, error / scale)
    assert expected.state.keys() == found.state.keys()
    state_tolerance = max(1e-7, tolerance)
    for name, value in expected.state.items():
        if name in expected.gradients and expected.gradients[name].abs().max() < 1e-9 * largest:
            continue  # Adam turns rounding into steps
        torch.testing.assert_close(
            found.state[name],
            value,
            rtol=state_tolerance,
            atol=state_tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )
