"""`autopar.parallelize` on real processes trains as one device does: loss, gradients, optimizers, state, checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar import api
from autopar.lower import ParallelModule
from autopar.plan import Plan
from tests.end_to_end.harness import (
    OPTIMIZERS,
    assert_near,
    assert_same_step,
    assert_same_training,
    error_of,
    gradients_of,
    launch,
    make,
    parallelize,
    run_step,
    state_of,
    whole,
)
from tests.random_plans import random_plan

pytestmark = pytest.mark.slow


def check_model(name: str, constraints: Sequence[str], optimizers: Sequence[str] = tuple(OPTIMIZERS)) -> None:
    """Everything about training one model by one plan."""
    model, inputs = make(name)
    single = copy.deepcopy(model)
    parallel = parallelize(model, inputs, constraints=constraints)
    assert set(constraints) <= set(parallel.plan.constraints)
    check_trained(parallel, single, inputs, optimizers)


def check_trained(
    parallel: ParallelModule, single: torch.nn.Module, inputs: Mapping[str, Any], optimizers: Sequence[str]
) -> None:
    assert_same_names(parallel, single)
    assert_near(state_of(parallel), state_of(single), 0.0)
    assert_same_step(parallel, single, inputs)
    assert_same_clipping(parallel, single)
    for optimizer in optimizers:
        assert_same_training(parallel, single, inputs, OPTIMIZERS[optimizer])


def assert_same_names(parallel: torch.nn.Module, single: torch.nn.Module) -> None:
    expected = [(n, p.shape, p.dtype, p.requires_grad) for n, p in single.named_parameters()]
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in parallel.named_parameters()] == expected
    assert all(isinstance(p, DTensor) for p in parallel.parameters())
    assert list(parallel.state_dict()) == list(single.state_dict())
    assert [n for n, _ in parallel.named_modules()] == [n for n, _ in single.named_modules()]


def assert_same_clipping(parallel: ParallelModule, single: torch.nn.Module) -> None:
    """Clips both, to half of the norm."""
    norm = clip_grad_norm_(single.parameters(), 1e9)
    wanted = clip_grad_norm_(single.parameters(), norm.item() / 2)
    found = parallel.clip_grad_norm_(norm.item() / 2)
    assert error_of(found, wanted) < 1e-5
    gradients = gradients_of(parallel)
    assert_near(gradients, gradients_of(single), 1e-4, floor=1e-2)
    clipped = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert abs(clipped.item() / norm.item() - 0.5) < 1e-4


def test_two_ranks_train_llama_and_gpt2() -> None:
    launch(
        2,
        partial(check_model, "llama", ("tensor=2",)),
        partial(check_model, "gpt2", ("data=2", "zero=3")),
    )


def test_two_ranks_train_other_models() -> None:
    launch(
        2,
        partial(check_model, "unet", ("data=2", "zero=2")),
        partial(check_model, "contrastive", ("data=2",)),
        partial(check_model, "contrastive", ("tensor=2", "zero=1")),
        partial(check_model, "frozen", ("sequence=2", "recompute=full")),
        partial(
            check_model, "llama", ("data=2", "microbatches=2", "recompute=selective", "zero=2"), ("adamw",)
        ),
    )
