"""`loss_fn=` on real processes: the call gives the loss, eval mode gives the loss or the outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import update_bn

from autopar.errors import LossError
from autopar.trace import LossFunction
from tests.end_to_end.harness import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    OPTIMIZERS,
    STEPS,
    assert_near,
    error_of,
    gradients_of,
    launch,
    parallelize,
    state_of,
)
from tests.end_to_end.pipelines import all_gradients
from tests.end_to_end.test_bad_input import refused

pytestmark = pytest.mark.slow


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.0))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16] -> [batch, 10]."""
        x = self.body(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


def masked(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (functional.cross_entropy(outputs, labels, reduction="none") * weights).sum() / weights.sum()


def check_training(loss_fn: LossFunction, constraints: Sequence[str], *, normed: bool = True) -> None:
    """Five steps as on one device, then both forms of evaluation."""
    torch.manual_seed(0)
    model = Classifier()
    if not normed:  # batch norm couples the samples, so it has no exact microbatches
        model.body[1] = nn.Identity()
    x, y, weights = torch.randn(8, 16), torch.randint(0, 10, (8,)), torch.rand(8)
    values = torch.randn(8, 10)
    target = (y, weights) if loss_fn is masked else values if loss_fn is functional.mse_loss else y
    targets = target if isinstance(target, tuple) else (target,)
    single = copy.deepcopy(model)
    parallel = parallelize(model, (x,), loss_fn=loss_fn, example_target=target, constraints=constraints)
    assert_near(state_of(parallel), state_of(single), 0.0)
    optimizers = [OPTIMIZERS["adamw foreach"](trained.parameters()) for trained in (single, parallel)]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, found = loss_fn(single(x), *targets), parallel(x, target=target)
        assert found.shape == ()
        assert abs(found.item() - expected.item()) < 10 * LOSS_TOLERANCE * abs(expected.item())
        expected.backward()
        found.backward()
        assert_near(all_gradients(parallel), gradients_of(single), GRADIENT_TOLERANCE, floor=1e-2)
        for optimizer in optimizers:
            optimizer.step()
    single.eval()
    parallel.eval()
    with torch.no_grad():
        outputs = single(x)
        assert error_of(parallel(x), outputs) < GRADIENT_TOLERANCE
        assert error_of(parallel(x=x, target=target), loss_fn(outputs, *targets)) < GRADIENT_TOLERANCE
        assert error_of(parallel(x), outputs) < GRADIENT_TOLERANCE


def test_two_ranks_train_with_a_loss_function() -> None:
    launch(
        2,
        partial(check_training, nn.CrossEntropyLoss(), ("data=2",)),
        partial(check_training, functional.mse_loss, ("tensor=2", "zero=1")),
        partial(check_training, masked, ("data=2", "microbatches=2", "zero=3"), normed=False),
        partial(check_training, masked, ("pipeline=2", "microbatches=4", "schedule=1f1b"), normed=False),
    )


def check_calls() -> None:
    """What a user forgets is said on every rank."""
    x, y = torch.randn(8, 16), torch.randint(0, 10, (8,))
    parallel = parallelize(Classifier(), (x,), loss_fn=nn.CrossEntropyLoss(), example_target=y)
    with refused(LossError, "target is missing", r"model\(\*inputs, target=target\)", "eval"):
        parallel(x)
    parallel.body[1].momentum = 0.2  # a call that would be planned for
    with refused(LossError, "target is missing"):
        parallel(x)
    with refused(LossError, "loss_fn fails on the model's outputs"):
        parallel(x, target=y[:5])
    with refused(LossError, r"tensor of shape \[8\]"):
        parallelize(Classifier(), (x,), loss_fn=nn.CrossEntropyLoss(reduction="none"), example_target=y)
    parallel(x, target=y).backward()


def check_statistics(constraints: Sequence[str]) -> None:
    """Those of batch norm are computed anew by calls without a target, between steps; none wants gradients."""
    torch.manual_seed(0)
    single, y = Classifier(), torch.randint(0, 10, (8,))
    batches = [torch.randn(8, 16) for _ in range(3)]
    parallel = parallelize(
        copy.deepcopy(single), (batches[0],), loss_fn=functional.cross_entropy, example_target=y,
        constraints=constraints,
    )  # fmt: skip
    for _ in range(2):
        update_bn([(x, y) for x in batches], single)
        update_bn([(x, y) for x in batches], parallel)
        assert_near(state_of(parallel), state_of(single), GRADIENT_TOLERANCE)
        with refused(LossError, "target is missing"):
            parallel(batches[0])
        expected, found = functional.cross_entropy(single(batches[0]), y), parallel(batches[0], target=y)
        assert abs(found.item() - expected.item()) < 10 * LOSS_TOLERANCE * abs(expected.item())
        found.backward()
    with torch.no_grad():
        assert error_of(parallel(batches[1]), single(batches[1])) < GRADIENT_TOLERANCE


def test_two_ranks_update_batch_norm() -> None:
    launch(2, partial(check_statistics, ("data=2",)), partial(check_statistics, ("pipeline=2",)))


def test_two_ranks_refuse_calls_without_a_target() -> None:
    launch(2, partial(check_calls))
