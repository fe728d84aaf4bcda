"""What torch's functions change of modules, and around them: it is what one device has, or refused with what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.fx import symbolic_trace
from torch.nn.utils import prune
from torch.utils import checkpoint

import autopar
from autopar.errors import ModelError
from tests.end_to_end.harness import launch, whole_mesh

PLANS = (("data=2",), ("data=2", "zero=3"), ("tensor=2",), ("pipeline=2",))


class Net(nn.Module):
    """Returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x).relu()).relu()
        return self.head(hidden).square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return Net().double(), torch.randn(8, 6).double()


def train(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(x)
        loss.backward()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.item())
    return losses


def checkpointed(model: nn.Module, x: Tensor, *, has_more: bool = False) -> Tensor:
    """The call of the model alone, or together with what is computed of its result, in a checkpoint."""
    untyped: Any = checkpoint

    def call(x: Tensor) -> Tensor:
        return model(x).exp().square() if has_more else model(x)

    return untyped.checkpoint(call, x, use_reentrant=False)


def refused(constraints: tuple[str, ...]) -> list[tuple[Callable[[Any, Any], Any], str]]:
    jit: Any = torch.jit
    pruned: Any = prune
    swap: Any = torch.utils.swap_tensors
    export: Any = torch.export
    renamed = "can't be removed or get another name, as torch.nn.utils.prune"
    calls: list[tuple[Callable[[Any, Any], Any], str]] = [
        (lambda m, x: pruned.l1_unstructured(m.first, "weight", amount=0.5), renamed),
        (lambda m, x: nn.utils.weight_norm(m.second), renamed),
        (lambda m, x: nn.utils.spectral_norm(m.head), renamed),
        (lambda m, x: setattr(m.first, "bias", None), renamed),
        (lambda m, x: delattr(m.first, "bias"), renamed),
        (lambda m, x: fully_shard(m), "can't be changed by fully_shard"),
        (lambda m, x: setattr(m, "_is_fsdp_managed_module", True), "wrapped in FullyShardedDataParallel"),
        (lambda m, x: jit.trace(m, (x,)), "can't be traced or scripted by torch.jit"),
        (lambda m, x: jit.script(m), "can't be traced or scripted by torch.jit"),
        (lambda m, x: symbolic_trace(m), r"can't be traced or scripted by .*torch\.fx"),
        (lambda m, x: symbolic_trace(nn.Sequential(m)), r"can't be traced or scripted by .*torch\.fx"),
        (lambda m, x: parallelize_module(m.first, whole_mesh(), ColwiseParallel()), "a part of a parallelized model"),
        (lambda m, x: parallelize_module(m, whole_mesh(), {"he*": ColwiseParallel()}), "a part of a parallelized"),
        (lambda m, x: distribute_module(m.second, whole_mesh()), "can't be changed by parallelize_module or"),
        (lambda m, x: swap(m.first.weight, nn.Parameter(torch.ones(8, 6).double())), "swap_tensors can't exchange"),
        (lambda m, x: swap(torch.ones(8, 6).double(), m.first.weight), r"copy values, with torch\.no_grad"),
    ]
    if "pipeline=2" not in constraints:  # torch copies parameters first, which fails for those of other stages
        calls.append((lambda m, x: export.export(m, (x,)), "can't be traced or scripted by torch.jit"))
    return calls


def check(constraints: tuple[str, ...], expected: list[list[float]]) -> None:
    model, x = made()
    parallel: Any = autopar.parallelize(model, whole_mesh(), (x,), profile=False, constraints=constraints)
    other = copy.deepcopy(parallel)  # before torch leaves something of a call that is refused
    for call, message in refused(constraints):
        with pytest.raises(ModelError, match=message):
            call(parallel, x)
    parallel.register_parameter("temperature", nn.Parameter(torch.ones(2).double()))
    assert parallel.full_state_dict().keys() == {*model.state_dict(), "temperature"}
    del parallel.temperature
    found = [
        train(partial(checkpointed, each, has_more=has_more), each, x)
        for each, has_more in ((parallel, False), (other, True))
    ]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", PLANS, ids=["data", "zero", "tensor", "pipeline"])
def test_changes_are_refused_and_checkpoints_change_nothing(constraints: tuple[str, ...]) -> None:
    expected: list[list[float]] = []
    for has_more in (False, True):
        model, x = made()
        expected.append(train(partial(checkpointed, model, has_more=has_more), model, x))
    launch(2, partial(check, constraints, expected))


def check_removals(constraints: tuple[str, ...]) -> None:
    """What computes weights of other parameters in a hook is part of the program, so it can't be removed."""
    utils, pruned = nn.utils, prune
    model, x = made()
    utils.weight_norm(model.first)
    utils.spectral_norm(model.second)
    pruned.l1_unstructured(model.head, "weight", amount=0.5)
    parallel: Any = autopar.parallelize(model, whole_mesh(), (x,), profile=False, constraints=constraints)
    removals: tuple[Callable[[Any], Any], ...] = (
        lambda m: utils.remove_weight_norm(m.first),
        lambda m: utils.remove_spectral_norm(m.second),
        lambda m: pruned.remove(m.head, "weight"),
    )
    for remove in removals:
        with pytest.raises(ModelError, match=r"can't be removed from a parallelized model.*load_state_dict"):
            remove(parallel)
    with pytest.raises(ValueError, match="not found"):  # as on one device
        utils.remove_weight_norm(parallelized_plain(constraints).first)
    torch.testing.assert_close(train(parallel, parallel, x), train(model, model, x), rtol=1e-9, atol=0)
    model.load_state_dict(parallel.full_state_dict())
    for remove in removals:
        remove(model)
    torch.testing.assert_close(model.eval()(x), parallel.eval()(x), rtol=1e-9, atol=0)


def parallelized_plain(constraints: tuple[str, ...]) -> Any:
    model, x = made()
    return autopar.parallelize(model, whole_mesh(), (x,), profile=False, constraints=constraints)


@pytest.mark.slow
def test_what_computes_weights_can_not_be_removed() -> None:
    launch(2, *(partial(check_removals, constraints) for constraints in PLANS))
