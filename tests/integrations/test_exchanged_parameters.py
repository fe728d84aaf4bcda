"""Optimizers that were made of a model's parameters, and train those of the parallel one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar.errors import TrainerError
from autopar.integrations.parallel_model import exchange_parameters
from tests.end_to_end.harness import launch, parallelize

BATCH = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)


def test_lbfgs_steps_on_the_new_parameters() -> None:
    original = nn.Linear(2, 2)
    parallel = copy.deepcopy(original)
    optimizer = torch.optim.LBFGS(original.parameters())
    exchange_parameters(optimizer, (original, parallel))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parallel(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    before = original.weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(original.weight, before)
    assert not torch.equal(parallel.weight, before)


def test_those_of_a_compiled_model_have_the_names_inside() -> None:
    original = nn.Sequential(nn.Linear(2, 2))
    parallel = copy.deepcopy(original)
    optimizer = torch.optim.SGD(original.parameters(), 0.1)
    exchange_parameters(optimizer, (torch.compile(original, backend="eager"), parallel))  # pyright: ignore[reportArgumentType]
    assert optimizer.param_groups[0]["params"][0] is parallel[0].weight


def made() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A model, a loss with parameters, and an optimizer of both."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double(), nn.Linear(4, 1).double()
    return model, loss, torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=0.1)


def train(model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(BATCH)).square().mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def check_loss_with_parameters() -> None:
    original, loss, optimizer = made()
    parallel = parallelize(original, BATCH, constraints=("zero=3",))
    with pytest.raises(TrainerError, match="parameters that are not the model's"):
        exchange_parameters(optimizer, (original, parallel))
    exchange_parameters(optimizer, (original, parallel), others=True)
    assert train(parallel, loss, optimizer) == pytest.approx(train(*made()), rel=1e-9)


@pytest.mark.slow
def test_parameters_of_a_loss_are_trained_beside_those_of_the_model() -> None:
    launch(2, check_loss_with_parameters)
