"""Regions of autocast and gradients within what ``torch.compile(backend="autopar")`` gets, and meshes that it opens."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
from traceback import walk_stack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from autopar.backend import session
from autopar.errors import AutoparError, TraceError
from autopar.lower.communication import consensus
from tests.backend.models import Mlp, compile_for, make_mesh, vector_batches
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


class HalfPrecise(nn.Module):
    """Computes in bfloat16 but for its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Mlp(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.body(x)
            with torch.autocast("cpu", enabled=False):
                return self.head(h.float())


def penalty_of(model: nn.Module, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def gradients_within() -> tuple[float, list[float], str, str]:
    mesh, model = make_mesh(), Mlp()
    half = HalfPrecise()
    x = next(vector_batches())
    cast = (compile_for(half, mesh, "data=2")(x) - half(x)).abs().max().item()

    x.requires_grad_()
    single = copy.deepcopy(model)
    with pytest.raises(AutoparError) as outside:
        penalty_of(compile_for(model, mesh), x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        loss = compile_for(lambda x: penalty_of(model, x), mesh, "data=2")(x)
    expected = penalty_of(single, x)
    loss.backward()
    expected.backward()
    apart = [(a.grad - b.grad).abs().max().item() for a, b in zip(model.parameters(), single.parameters(), strict=True)
             if a.grad is not None and b.grad is not None]  # fmt: skip
    with pytest.raises(TraceError) as functional:
        compile_for(lambda x: torch.func.grad(lambda x: model(x).sum())(x), mesh)(x)
    return cast, [abs(loss.item() - expected.item()), *apart], str(outside.value), str(functional.value)


def test_regions_of_a_graph_are_those_of_one_device() -> None:
    for cast, apart, outside, functional in run_ranks(gradients_within, 2):
        assert cast < 1e-2
        assert len(apart) > 3
        assert max(apart) < 1e-6
        assert "torch._dynamo.config.trace_autograd_ops = True" in outside
        assert "a gradient by torch.func" in functional
        assert "torch.compiler.disable" in functional


class Checkpointed(Mlp):
    """The same program, whose layers Dynamo names otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def the_same_program_twice() -> list[float]:
    mesh, found = make_mesh(), list[float]()
    x = next(vector_batches())
    for kind in (Checkpointed, Mlp):
        torch.manual_seed(0)
        model = kind()
        found.append((compile_for(model, mesh, "data=2")(x) - model(x)).abs().max().item())
        torch._dynamo.reset()
    return found


def test_a_plan_of_a_program_with_other_names_is_not_taken() -> None:
    for found in run_ranks(the_same_program_twice, 2):
        assert max(found) < 1e-6


def meshes_opened() -> list[bool]:
    """For each mesh, whether another rank would wait here for this rank's errors."""
    found: list[bool] = []
    make = session.make_mesh

    def watch(*args: Any) -> Any:
        found.append(any(frame.f_code is consensus.attempt.__code__ for frame, _ in walk_stack(None)))
        return make(*args)

    with patch.object(session, "make_mesh", watch):
        for model in Mlp().eval(), Mlp():
            mesh = init_device_mesh("cpu", (1, 2))
            session._sessions.clear()
            torch._dynamo.reset()
            compile_for(model, mesh, shard=True)(torch.ones(4, 8)).sum()
    return found


def test_ranks_that_open_a_mesh_wait_for_no_errors_of_each_other() -> None:
    for found in run_ranks(meshes_opened, 2):
        assert found == [False, False]
