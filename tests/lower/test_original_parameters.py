"""An optimizer of the original's parameters, which a parallel module does not train, is found at its first step."""

from __future__ import annotations

import gc

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
