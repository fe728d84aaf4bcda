"""A lowered module over real processes: gloo instead of threads, and torch's own optimizer on DTensors."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar.lower import lower
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.trace import trace
from tests.lower.runs import Run, assert_same, executable, loss_of, train_single
from tests.models import make
from tests.random_plans import random_plan
from tests.ranks import run_ranks

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def train(name: str, world: int, seed: int, num_microbatches: int) -> tuple[Any, Any, Any]:
    """Two steps on this rank: losses, first gradients, state."""
    model, inputs = make(name)
    traced = trace(model, (), inputs)
    plan = random_plan(traced.program, world, seed, num_microbatches)
    parallel = lower(
        executable(traced, plan), module=model, communicator=ProcessGroupCommunicator(),
        mesh=init_device_mesh("cpu", (world,)),
    )  # fmt: skip
    optimizer = ADAMW([p for p in parallel.parameters() if p.requires_grad])
    losses, gradients = [], {}
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(parallel(**inputs))
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.full_tensor() for n, p in parallel.named_parameters() if p.grad is not None}
        optimizer.step()
    return tuple(losses), gradients, {n: x.clone() for n, x in parallel.full_state_dict().items()}


@pytest.mark.slow
def test_gloo_processes_train_as_one_device() -> None:
    model, inputs = make("plain_gpt")
    expected = train_single(model, inputs, make_optimizer=ADAMW)
    for seed, num_microbatches in ((0, 1), (3, 2)):
        for run in run_ranks(train, 4, "plain_gpt", 4, seed, num_microbatches):
            assert_same(expected, Run(*run))
