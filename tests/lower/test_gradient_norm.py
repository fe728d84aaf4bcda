"""`torch.nn.utils` clips gradients of pipeline stages, all or some, by the norm that they have on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from autopar.lower import ParallelModule
from autopar.lower.communication.simulated_ranks import simulate
from autopar.trace import Traced, trace
from tests.lower.runs import build, loss_of
from tests.models import make
from tests.random_plans import random_pipeline

WORLD = 4


@cache
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], Traced]:
    model, inputs = make(name)
    if name == "plain_gpt":
        model.unused = nn.Parameter(torch.ones(3))
        model.blocks[0].requires_grad_(False)
    return model, inputs, trace(model, (), inputs)


def on_stages(name: str, action: Callable[[Any], Any], schedule: str = "1f1b", seed: int = 0) -> list[Any]:
    """``action(model)`` on one device, and on every rank of two groups with stages, after one backward pass."""
    model, inputs, traced = traced_model(name)
    single = copy.deepcopy(model)
    loss_of(single(**inputs)).backward()
    plan = random_pipeline(traced.program, WORLD, seed, 2, schedule, 2)

    def run(communicator: Any) -> Any:
        parallel = build(model, traced, plan, communicator)
        loss_of(parallel(**inputs)).backward()
        return action(parallel)

    return [action(single), *simulate(WORLD, run)]


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Whole gradients by name; every rank calls it."""
    if not isinstance(model, ParallelModule):
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    own = {name: p.grad for name, p in model.named_parameters()}
    program = model._executor.executable.program
    held = {
        value: name for layer in program.layers for value in layer.state for name in [program.parameters.get(value)]
    }
    trained = sorted(name for value, name in held.items() if name and program.values[value].requires_grad)
    return {name: model._whole(name, own.get(name)) for name in trained}


def assert_clipped(results: list[tuple[Tensor, dict[str, Tensor]]], tolerance: float = 1e-9) -> None:
    (norm, expected), *ranks = results
    for found, gradients in ranks:
        assert gradients.keys() == expected.keys()
        assert not isinstance(found, DTensor)
        torch.testing.assert_close(found, norm, rtol=tolerance, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance * norm.max().item())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("foreach", [True, False, None])
def test_clipping_is_by_the_norm_of_all_stages(foreach: bool | None) -> None:
    def clip(model: Any) -> Any:
        norms: list[Tensor] = []
        for number, norm_type in enumerate((2.0, 1.0, 3.0, float("inf"))):
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(get_total_norm(gradients, norm_type, foreach=foreach))
            max_norm = norms[-1].item() / (1 + number)
            assert torch.equal(clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach), norms[-1])
        return torch.stack(norms), gradients_of(model)

    assert_clipped(on_stages("plain_gpt", clip))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_what_is_tied_across_stages_counts_once(schedule: str) -> None:
    def clip(model: Any) -> Any:
        return clip_grad_norm_(model.parameters(), 0.05), gradients_of(model)

    assert_clipped(on_stages("gpt2", clip, schedule), tolerance=2e-4)  # the model computes its loss in float32


@pytest.mark.slow
def test_a_stage_with_nothing_to_train_takes_part() -> None:
    def clip(model: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        assert trained
        norms = [clip_grad_norm_(trained, 0.05, norm_type) for norm_type in (2.0, float("inf"))]
        return torch.stack(norms), gradients_of(model)

    assert_clipped(on_stages("deep_half_frozen", clip))


@pytest.mark.slow
def test_gradients_that_were_accumulated_and_cut_off_are_still_clipped_together() -> None:
    _, inputs, _ = traced_model("plain_gpt")

    def clip(model: Any) -> Any:
        (2 * loss_of(model(**inputs))).backward()
        clip_grad_value_(model.parameters(), 0.01)
        return clip_grad_norm_(model.parameters(), 0.05), gradients_of(model)

    assert_clipped(on_stages("plain_gpt", clip))


def test_norms_by_hand() -> None:
    def measure(model: Any) -> Any:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms = torch.stack([torch.norm(g.detach(), 2) for g in gradients])
        squares = sum(g.norm() ** 2 for g in gradients)
        return torch.stack(
            [*norms, torch.norm(norms, 2), squares, *(g.abs().mean().item() * norms[0] for g in gradients)]
        )

    norm, *ranks = on_stages("plain_gpt", measure)
    for found in ranks:
        assert not isinstance(found, DTensor)
        torch.testing.assert_close(found, norm, rtol=1e-9, atol=0)


def test_a_plain_model_may_be_clipped_along() -> None:
    other = nn.Linear(3, 2).double()
    other(torch.ones(3).double()).sum().backward()

    def clip(model: Any) -> Any:
        plain = copy.deepcopy(other)
        plain.weight.grad = other.weight.grad.clone()
        return clip_grad_norm_([*model.parameters(), *plain.parameters()], 0.05), gradients_of(model)

    assert_clipped(on_stages("plain_gpt", clip))


def test_parts_of_the_parameters_may_be_clipped() -> None:
    def clip(model: Any) -> Any:
        norms = [clip_grad_norm_(part.parameters(), 0.01) for part in (model.head, model.blocks[1])]
        norms.append(clip_grad_norm_(list(model.parameters())[1:], 0.05))
        return torch.stack(norms), gradients_of(model)

    assert_clipped(on_stages("plain_gpt", clip))


@pytest.mark.parametrize("order", [0.0, -1.0, float("-inf")])
def test_orders_that_are_not_positive(order: float) -> None:
    norm, *ranks = on_stages("plain_gpt", lambda model: clip_grad_norm_(model.parameters(), 1.0, norm_type=order))
    for found in ranks:
        torch.testing.assert_close(found, norm, rtol=1e-9, atol=0)
