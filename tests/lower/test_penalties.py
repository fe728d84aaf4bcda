"""Losses to which the training script adds what it computes of parameters, outside of forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autopar
from tests.ranks import run_ranks

_PLANS = {"tensor": ("tensor=2",), "zero": ("zero=3",), "stages": ("pipeline=2", "microbatches=2")}


class Tagger(nn.Module):
    """Its loss and features, and with one argument the features alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        """[rows, places] -> a scalar and [rows, places, 8]."""
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        if labels is None:
            return x
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()), x


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def with_two_penalties(model: nn.Module, ids: Tensor) -> Tensor:
    loss, features = model(ids, ids)
    return loss + 0.1 * features.square().mean() + 0.01 * whole(model.head.weight.abs().sum())


def penalized(model: nn.Module, ids: Tensor) -> Tensor:
    squares = sum(p.pow(2).sum() for p in model.parameters())
    norms = sum(torch.linalg.vector_norm(p) for p in model.parameters())
    return model(ids, ids)[0] + 0.01 * squares + 0.02 * norms


def with_own_head(model: nn.Module, ids: Tensor) -> Tensor:
    logits = functional.linear(model(ids), whole(model.head.weight))
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def train(model: nn.Module, loss_of: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps, and what parameters are then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(2):
        ids = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        losses.append(whole(loss.detach()).item())
    return losses, {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def compare() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, constraints in _PLANS.items():
        for loss_of in (penalized, with_own_head, with_two_penalties)[: 1 if name == "stages" else 3]:
            torch.manual_seed(0)
            model = Tagger().double()
            ids = torch.zeros(4, 6, dtype=torch.int64)
            inputs = (ids,) if loss_of is with_own_head else (ids, ids)
            parallel = autopar.parallelize(model, mesh, inputs, constraints=constraints, profile=False)
            losses, parameters = train(parallel, loss_of)
            torch.manual_seed(0)
            expected, wanted = train(Tagger().double(), loss_of)
            if name != "stages":  # where each rank adds the penalty of its own parameters
                torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
                assert parameters.keys() == wanted.keys()
            assert parameters
            for key, value in parameters.items():
                torch.testing.assert_close(value, wanted[key], rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")


def check_inputs_of_each() -> None:
    """Of two models on one mesh, one of which gets other rows on each rank."""
    mesh, ids = init_device_mesh("cpu", (2,)), torch.zeros(4, 6, dtype=torch.int64)
    torch.manual_seed(0)
    of_rows, of_batches = (
        autopar.parallelize(Tagger(), mesh, (ids, ids), constraints=("data=2",), profile=False, inputs=inputs)
        for inputs in ("local", "global")
    )
    assert (torch.eye(16) - of_batches.head.weight @ of_batches.head.weight.T).requires_grad
    with pytest.raises(autopar.errors.MeshError, match="would be that of this rank's rows only"):
        torch.eye(16) - of_rows.head.weight @ of_rows.head.weight.T


@pytest.mark.slow
def test_a_model_of_own_rows_does_not_have_others_refused() -> None:
    run_ranks(check_inputs_of_each, 2)


@pytest.mark.slow
def test_what_is_computed_of_parameters_outside_trains_as_on_one_device() -> None:
    run_ranks(compare, 2)
