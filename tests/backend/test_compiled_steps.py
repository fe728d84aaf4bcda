"""A training step that is compiled as a whole, backward and optimizer included, and ranks that fail before they run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.backend import running
from tests.backend.models import Mlp, compile_for, make_mesh, vector_batches
from tests.ranks import run_ranks

SOON_S = 30.0  # far below the timeout of a process group

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def train(make: Callable[[Any], torch.optim.Optimizer], **how: Any) -> list[Tensor]:
    """Losses of steps, and the parameters after them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp().double()
    optimizer = make(model.parameters())

    @torch.compile(**how)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step(x.double()) for x in vector_batches()]
    return [*losses, *(x.detach() for x in model.parameters())]


def train_on_ranks() -> dict[str, float]:
    """How far steps are from one device's, by optimizer."""
    options = {"mesh": make_mesh(), "profile": False, "constraints": ["data=2"]}
    apart: dict[str, float] = {}
    for name, make in OPTIMIZERS.items():
        found, expected = train(make, backend="autopar", options=options), train(make, backend="eager")
        apart[name] = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return apart


@pytest.mark.slow
def test_a_whole_step_trains_as_on_one_device() -> None:
    for apart in run_ranks(train_on_ranks, 2, timeout_s=400):
        assert apart.keys() == OPTIMIZERS.keys()
        assert max(apart.values()) < 1e-12


def fail_on_one_rank() -> tuple[float, str]:
    """Seconds until a rank knows that another one has no memory for its part, and what it is told."""
    torch._dynamo.reset()

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    compiled = compile_for(Mlp(), make_mesh(), "data=2", "tensor=2")
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(running, "_store", fail)
        started = time.perf_counter()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            compiled(torch.ones(4, 8))
        took_s = time.perf_counter() - started
    compiled(torch.ones(4, 8)).sum().backward()  # nothing is lost
    return took_s, str(caught.value)


@pytest.mark.slow
def test_a_rank_without_memory_keeps_nobody_waiting() -> None:
    for took_s, said in run_ranks(fail_on_one_rank, 4, timeout_s=200):
        assert took_s < SOON_S
        assert "tried to allocate 20 GiB" in said
