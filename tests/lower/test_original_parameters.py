"""An optimizer of the original's parameters, which a parallel module does not train, is found at its first step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import OptimizerError
from autopar.lower.parameters.original_parameters import _ORIGINALS, watch_optimizers


def watched(*, frozen: bool = False) -> nn.Module:
    model = nn.Linear(3, 2).requires_grad_(not frozen)
    watch_optimizers(model.parameters())
    return model


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_without_gradients_is_an_error(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([*nn.Linear(2, 2).parameters(), *watched().parameters()], lr=0.1)
    with pytest.raises(OptimizerError, match=rf"{kind.__name__} has 2 parameters.*Make the optimizer after it"):
        optimizer.step()


@pytest.mark.parametrize("unscales", [False, True])
def test_a_step_by_a_gradient_scaler_is_the_same_error(*, unscales: bool) -> None:
    scaler: Any = torch.amp.GradScaler("cpu")
    loss = nn.Linear(2, 2)(torch.ones(1, 2)).sum()
    optimizer = torch.optim.SGD(watched().parameters(), lr=0.1)
    scaler.scale(loss).backward()
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(OptimizerError, match=r"SGD has 2 parameters.*Make the optimizer after it"):
        scaler.step(optimizer)
    own = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with pytest.raises(AssertionError, match="No inf checks"):  # as without autopar
        scaler.step(optimizer)


def test_training_the_original_itself_is_none() -> None:
    model, other = watched(), nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())

    def compute() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(compute)
    torch.optim.SGD(model.parameters(), 0.1).step()
    torch.optim.SGD(other.parameters(), 0.1).step()
    torch.optim.SGD([*watched(frozen=True).parameters(), *other.parameters()], 0.1).step()


def test_nothing_keeps_the_original_in_memory() -> None:
    gc.freeze()  # what is there already is not looked through
    before = len(_ORIGINALS)
    model = watched()
    assert len(_ORIGINALS) == before + 2
    del model
    gc.collect()
    assert len(_ORIGINALS) == before
