"""On real processes `autopar.parallelize` trains as one device does: loss, gradients, optimizers, checkpoints."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar import api
from autopar.lower import ParallelModule
from autopar.plan import LayerStrategy, Plan
from autopar.planning.call_traces import trace_model
from autopar.verify.rehearsal import loss_of
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
    state_of,
    train,
    train_on,
    whole,
    whole_mesh,
)
from tests.random_plans import random_plan

pytestmark = pytest.mark.slow


# Every optimizer and every norm go through one model here: on each layout of a DTensor they are tried in
# `tests/lower/test_dtensors.py` and `test_gradient_norm.py`.  The first call of each on a layout costs torch's DTensor
# more than a model's step, on every rank.
ALL_OPTIMIZERS = tuple(OPTIMIZERS)
ONE_NORM = ((2.0, True),)
ALL_NORMS = tuple(itertools.product((1.0, 2.0, torch.inf), (True, False)))
Norms = tuple[tuple[float, bool], ...]


def check_model(name: str, constraints: Sequence[str], *optimizers: str, norms: Norms = ONE_NORM) -> None:
    """Everything about training one model by one plan."""
    model, inputs = make(name)
    single = copy.deepcopy(model)
    parallel = parallelize(model, inputs, constraints=constraints)
    assert set(constraints) <= set(parallel.plan.constraints)
    check_trained(parallel, single, inputs, *optimizers, norms=norms)


def check_trained(
    parallel: ParallelModule,
    single: torch.nn.Module,
    inputs: Mapping[str, Any],
    *optimizers: str,
    norms: Norms = ONE_NORM,
) -> None:
    assert_same_names(parallel, single)
    assert_near(state_of(parallel), state_of(single), 0.0)
    assert_same_step(parallel, single, inputs)
    assert_same_clipping(parallel, single, norms)
    for optimizer in optimizers:
        assert_same_training(parallel, single, inputs, OPTIMIZERS[optimizer])


def assert_same_names(parallel: torch.nn.Module, single: torch.nn.Module) -> None:
    expected = [(n, p.shape, p.dtype, p.requires_grad) for n, p in single.named_parameters()]
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in parallel.named_parameters()] == expected
    assert all(isinstance(p, DTensor) for p in parallel.parameters())
    assert list(parallel.state_dict()) == list(single.state_dict())
    assert [n for n, _ in parallel.named_modules()] == [n for n, _ in single.named_modules()]


def assert_same_clipping(parallel: ParallelModule, single: torch.nn.Module, norms: Norms) -> None:
    """Clips both, to half of the norm; `norms`: which norm, and whether by torch's foreach functions."""
    norm = clip_grad_norm_(single.parameters(), 1e9)
    for kind, foreach in norms:
        found, wanted = (clip_grad_norm_(m.parameters(), 1e9, kind, foreach=foreach) for m in (parallel, single))
        assert error_of(whole(found), wanted) < 1e-5
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
        partial(check_model, "llama", ("tensor=2",), *ALL_OPTIMIZERS, norms=ALL_NORMS),
        partial(check_model, "gpt2", ("data=2", "zero=3"), "adamw foreach"),
    )


def test_two_ranks_train_other_models() -> None:
    launch(
        2,
        partial(check_model, "unet", ("data=2", "zero=2"), "sgd momentum"),
        partial(check_model, "contrastive", ("data=2",), "adamw foreach"),
        partial(check_model, "frozen", ("sequence=2", "recompute=full"), "sgd momentum"),
    )


def test_two_ranks_train_from_the_hosts_memory() -> None:
    launch(
        2,
        partial(check_model, "llama", ("data=2", "zero=3", "offload=optimizer"), "adamw"),
        partial(check_model, "unet", ("data=2", "zero=1", "offload=optimizer", "gradients=fp32"), "adamw foreach"),
    )


def check_plan_of_any_kind(name: str, seed: int, num_microbatches: int = 1) -> None:
    """A plan that nobody would choose: its layers have meshes and layouts of their own."""
    model, inputs = make(name)
    plan = random_plan(trace_model(model, inputs).program, dist.get_world_size(), seed, num_microbatches)
    parallel = parallelize(copy.deepcopy(model), inputs, plan=plan)
    assert parallel.plan.decisions == plan.decisions
    check_trained(parallel, model, inputs, "adamw foreach")


def check_scoped_constraints() -> None:
    """Neighboring layers on different meshes, by patterns."""
    model, inputs = make("llama")
    parallel = parallelize(
        copy.deepcopy(model),
        inputs,
        constraints=(
            "model.layers.0: tensor=4",
            "model.layers.1: data=2",
            "model.layers.1: tensor=2",
            "model.layers.1: zero=3",
            "lm_head: replicate",
            "model.embed_tokens: recompute=full",
        ),
    )
    first, second = (strategy_of(parallel.plan, f"model.layers.{i}") for i in (0, 1))
    assert first.mesh == (4,)
    assert sorted(second.mesh) == [2, 2]
    assert first.zero != second.zero == 3
    head = dict(parallel.named_parameters())["lm_head.weight"]
    assert isinstance(head, DTensor)
    assert all(placement.is_replicate() for placement in head.placements)
    assert not all(p.is_replicate() for p in parallel.get_parameter("model.layers.0.mlp.up_proj.weight").placements)
    check_trained(parallel, model, inputs, "adamw foreach", norms=ALL_NORMS)


def strategy_of(plan: Plan, layer: str) -> LayerStrategy:
    return next(plan.strategies[planned.strategy] for planned in plan.layers if planned.name == layer)


def test_four_ranks_train_layers_on_different_meshes() -> None:
    launch(
        4,
        partial(check_scoped_constraints),
        partial(check_plan_of_any_kind, "gpt2", 1),
        partial(check_plan_of_any_kind, "llama", 2, 2),
    )


def perturb(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Other values for everything in a model's state, as a single device's checkpoint."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: x + torch.randn(x.shape, generator=generator) / 10 if x.is_floating_point() else x + 3
        for name, x in model.state_dict().items()
    }


def check_checkpoints(folder: str) -> None:
    """A single device's checkpoint goes in; torch.distributed.checkpoint goes round and training goes on."""
    model, inputs = make("unet")
    parallel = parallelize(model, inputs, constraints=("data=2", "zero=3"))
    checkpoint = perturb(model)
    assert str(parallel.load_state_dict(checkpoint)) == "<All keys matched successfully>"
    assert_near(state_of(parallel), checkpoint, 0.0)
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        parallel.load_state_dict({name: x for name, x in checkpoint.items() if name != "head.bias"})

    dcp.save({"model": parallel.state_dict()}, checkpoint_id=folder)
    other = parallelize(model, inputs, constraints=("tensor=2",))
    fresh = other.state_dict()
    dcp.load({"model": fresh}, checkpoint_id=folder)
    other.load_state_dict(fresh)
    assert_near(state_of(other), checkpoint, 0.0)
    model.load_state_dict(checkpoint)
    assert_same_step(other, model, inputs)


def check_resuming(folder: str) -> None:
    """Model and optimizer, saved after two steps and loaded into others, go on as if nothing had happened."""
    model, inputs = make("llama")
    parallel = parallelize(model, inputs, constraints=("data=2", "zero=3"))
    optimizer = OPTIMIZERS["adamw foreach"](parallel.parameters())
    train_on(parallel, optimizer, inputs, 2)
    state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    expected = train_on(parallel, optimizer, inputs, 2)

    resumed = parallelize(model, inputs, plan=parallel.plan)
    optimizer = OPTIMIZERS["adamw foreach"](resumed.parameters())
    state, optimizer_state = get_state_dict(resumed, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(resumed, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    assert train_on(resumed, optimizer, inputs, 2) == expected


def check_plan_file(folder: str) -> None:
    """A plan goes through a file; the one that `autopar.plan` finds without processes runs too."""
    model, inputs = make("llama")
    parallel = parallelize(model, inputs, constraints=("tensor=2", "recompute=full"))
    path = Path(folder) / "plan.json"
    if dist.get_rank() == 0:
        parallel.plan.save(path)
    dist.barrier()
    for given in (path, str(path)):
        again = parallelize(model, inputs, plan=given)
        assert again.plan == parallel.plan
    assert_same_step(again, model, inputs)
    found = autopar.plan(model, whole_mesh(), inputs, constraints=("data=2",))
    assert_same_step(parallelize(model, inputs, plan=found), model, inputs)


def check_measured_prices(folder: str) -> None:
    """Without a profile this machine is measured, once."""
    api._CACHE = Path(folder) / "cache"
    model, inputs = make("contrastive")
    before = torch.get_rng_state()
    parallel = parallelize(model, inputs, profile=None)
    assert torch.equal(torch.get_rng_state(), before), "ranks draw their batches from generators that are in step"
    assert "estimate" not in dict(parallel.plan.price_source)
    assert len(list(api._CACHE.glob("*.json"))) == 1
    started = time.process_time()  # on a busy machine a rank waits, but it computes no more
    assert parallelize(model, inputs, profile=None).plan.step_time_s == parallel.plan.step_time_s
    assert time.process_time() - started < 5
    assert_same_step(parallel, model, inputs)


def test_two_ranks_keep_and_load_state(tmp_path: Path) -> None:
    launch(
        2,
        partial(check_checkpoints, str(tmp_path / "checkpoint")),
        partial(check_resuming, str(tmp_path / "training")),
        partial(check_plan_file, str(tmp_path)),
        partial(check_measured_prices, str(tmp_path)),
    )


def check_accumulation(constraints: Sequence[str]) -> None:
    """Gradients of several backward passes add up, as the user's own loop wants it."""
    model, inputs = make("llama")
    other = dict(inputs)
    other["input_ids"] = inputs["input_ids"].flip(0, 1)
    other["labels"] = inputs["labels"].flip(0)
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=constraints)
    for trained in (model, parallel):
        for batch in (inputs, other):
            (loss_of(trained(**batch)) / 2).backward()
    assert_near(gradients_of(parallel), gradients_of(model), 1e-4, floor=1e-2)
    assert_same_step(parallel, model, inputs)


def check_no_grad() -> None:
    """A forward in training mode without gradients, in between."""
    model, inputs = make("llama")
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("data=2", "microbatches=2"))
    with torch.no_grad():
        expected, found = loss_of_all(model(**inputs)), loss_of_all(parallel(**inputs))
    assert not found.requires_grad
    assert error_of(found, expected) < 1e-6
    with torch.inference_mode():
        assert error_of(loss_of_all(parallel(**inputs)), expected) < 1e-6
    assert_same_step(parallel, model, inputs)


def loss_of_all(output: Any) -> torch.Tensor:
    return output["loss"]


def check_narrow_precision(name: str, constraints: Sequence[str]) -> None:
    """Computes in bfloat16, keeps parameters and gradients in float32; close to one device that casts alike."""
    model, inputs = make(name)
    parallel = parallelize(copy.deepcopy(model), inputs, precision="bf16", constraints=constraints)
    narrow = {n: p.to(torch.bfloat16) for n, p in model.named_parameters()}
    cast = {n: x.to(torch.bfloat16) if x.is_floating_point() else x for n, x in inputs.items()}
    expected, full = loss_of(functional_call(model, narrow, (), cast)), loss_of(model(**inputs))
    expected.backward()
    loss = loss_of(parallel(**inputs))
    loss.backward()
    rounding = abs(expected.item() - full.item())
    assert 1e-6 < rounding < 1e-2, "the cast is to be seen in the loss"
    assert abs(loss.item() - expected.item()) < 5e-3 * expected.item()
    assert loss.item() != full.item()
    gradients = gradients_of(parallel)
    assert all(g.dtype == torch.float32 for g in gradients.values())
    largest = max(p.grad.norm().item() for p in model.parameters() if p.grad is not None)
    for parameter, wanted in ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None):
        error = (gradients[parameter] - wanted).norm() / max(wanted.norm().item(), 0.1 * largest)
        assert error < 0.05, f"{parameter}: {error}"
    losses = train(parallel, inputs, OPTIMIZERS["adamw foreach"])
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in parallel.parameters())


def test_two_ranks_train_in_the_users_own_loop() -> None:
    launch(
        2,
        partial(check_accumulation, ("data=2", "zero=3")),
        partial(check_accumulation, ("tensor=2", "microbatches=2", "zero=1")),
        partial(check_no_grad),
        partial(check_narrow_precision, "llama", ("tensor=2",)),
        partial(check_narrow_precision, "plain_gpt", ("data=2", "zero=3", "microbatches=2")),
    )
