"""Optimizers that were made of a model's parameters, and train those of the parallel one."""

from __future__ import annotations

import copy

import torch
from torch import nn

from autopar.integrations.parallel_model import exchange_parameters


def test_lbfgs_steps_on_the_new_parameters() -> None:
    original = nn.Linear(2, 2)
    parallel = copy.deepcopy(original)
    optimizer = torch.optim.LBFGS(original.parameters())
    exchange_parameters(optimizer, original, parallel)

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
    exchange_parameters(optimizer, torch.compile(original, backend="eager"), parallel)  # pyright: ignore[reportArgumentType]
    assert optimizer.param_groups[0]["params"][0] is parallel[0].weight
