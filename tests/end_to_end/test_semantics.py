"""What one device means, kept on several: dropout, eval mode, buffers, what is not finite, outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_structure

from autopar.lower import ParallelModule
from autopar.verify.rehearsal import loss_of
from tests import models
from tests.end_to_end.harness import (
    OPTIMIZERS,
    STEPS,
    assert_near,
    assert_same_step,
    assert_same_training_by_outside_loss,
    error_of,
    gradients_of,
    launch,
    loss_without_gradients,
    make,
    parallelize,
    run_step,
    state_of,
    train,
    whole,
)

pytestmark = pytest.mark.slow


class Dropped(nn.Module):
    """Shows what dropout keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """[batch, 64] -> {"loss", "kept"}."""
        kept = functional.dropout(x * self.scale, 0.25, self.training)
        return {"loss": kept.square().mean(), "kept": kept}


class OddlyDropped(nn.Module):
    """A dropout that can't be cut: its sizes are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(15, 64), nn.GELU(), nn.Linear(64, 15), nn.Dropout(0.3))
        self.head = nn.Linear(15, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, 15] and [batch] -> a scalar."""
        return functional.cross_entropy(self.head(self.body(x)), y)


def check_draws_of_whole_values(batch: int, constraints: Sequence[str]) -> None:
    """What is whole on several devices is dropped alike, so replicas stay equal as they train."""
    inputs = {"x": torch.ones(batch, 15), "y": torch.arange(batch) % 5}
    parallel = parallelize(OddlyDropped(), inputs, constraints=constraints)
    torch.manual_seed(dist.get_rank())
    losses = train(parallel, inputs, OPTIMIZERS["sgd momentum"])
    assert len(set(losses)) == STEPS
    assert_replicas_agree(parallel)


def make_gpt(name: str = "plain_gpt", dropout: float = 0.2) -> models.Model:
    """Models with dropout; that of "gpt2" drops inside attention, too."""
    torch.manual_seed(0)
    factory = models.make_gpt2 if name == "gpt2" else models.make_plain_gpt
    model, inputs = factory(dropout=dropout)
    return model.double(), inputs


def assert_replicas_agree(model: nn.Module) -> None:
    """Every rank that holds the same part of a parameter holds the same numbers."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None
        part = tuple(c for c, p in zip(coordinate, parameter.placements, strict=True) if p.is_shard())
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (part, parameter.to_local().detach()))
        for other, values in everybody:
            assert other != part or torch.equal(values, parameter.to_local()), name


def check_draws_of_shards() -> None:
    """Shards draw differently, one device's share of zeros, the same again under a seed, others in another step."""
    x = torch.ones(8, 64)
    parallel = parallelize(Dropped(), (x,), constraints=("data=2",))
    torch.manual_seed(3 + dist.get_rank())  # rank 0's seed counts
    first, second = whole(parallel(x))["kept"], whole(parallel(x))["kept"]
    torch.manual_seed(3 + 10 * dist.get_rank())
    again = whole(parallel(x))["kept"]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:4], first[4:])
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert 0.1 < (first == 0).float().mean().item() < 0.4
    kept: list[Any] = [None, None]
    dist.all_gather_object(kept, first)
    assert torch.equal(*kept)


def check_draws_of_replicas(constraints: Sequence[str], name: str = "plain_gpt") -> None:
    """Where a value is whole on several devices they drop the same, so replicas stay equal as they train."""
    model, inputs = make_gpt(name)
    parallel = parallelize(model, inputs, constraints=constraints)
    torch.manual_seed(dist.get_rank())
    losses = train(parallel, inputs, OPTIMIZERS["adamw foreach"])
    assert len(set(losses)) == STEPS
    assert_replicas_agree(parallel)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, losses)
    assert everybody == [losses] * len(everybody)


def seeded_step(parallel: ParallelModule, inputs: Mapping[str, Any], seed: int = 5) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(seed)
    parallel.zero_grad()
    loss = run_step(parallel, inputs)
    return loss, gradients_of(parallel)


def check_recomputation(constraints: Sequence[str], name: str = "plain_gpt") -> None:
    """Recomputing draws again what forward drew: the same gradients, which are those of the loss."""
    model, inputs = make_gpt(name)
    parallel = parallelize(model, inputs, constraints=(*constraints, "recompute=none"))
    loss, gradients = seeded_step(parallel, inputs)
    for recompute in ("selective", "full"):
        strategies = tuple(replace(s, recompute=recompute) for s in parallel.plan.strategies)
        other = parallelize(model, inputs, plan=parallel.plan.with_decisions(strategies=strategies))
        other_loss, other_gradients = seeded_step(other, inputs)
        assert other_loss == loss
        assert_near(other_gradients, gradients, 1e-12)
    assert seeded_step(parallel, inputs, seed=6)[0] != loss
    assert_slope(parallel, inputs, gradients)


def assert_slope(parallel: ParallelModule, inputs: Mapping[str, Any], gradients: Mapping[str, Tensor]) -> None:
    """The loss under the same draws changes along a direction as the gradients say.

    Coarsely, since real models compute their loss in float32; other draws would change it a hundred times as much.
    """
    generator = torch.Generator().manual_seed(0)
    state = state_of(parallel)
    direction = {n: torch.randn(g.shape, generator=generator, dtype=g.dtype) for n, g in gradients.items()}
    step = {id(p): direction[n] for n, p in parallel.named_parameters() if n in direction}
    names = {n: step[id(p)] for n, p in parallel.named_parameters(remove_duplicate=False) if id(p) in step}
    size = 3e-4
    losses: list[float] = []
    for sign in (1, -1):
        parallel.load_state_dict(state | {n: state[n] + sign * size * d for n, d in names.items()})
        torch.manual_seed(5)
        losses.append(loss_without_gradients(parallel, inputs))
    slope = (losses[0] - losses[1]) / (2 * size)
    expected = sum((gradients[n] * d).sum().item() for n, d in direction.items())
    assert abs(slope - expected) < 5e-3 * max(abs(expected), 1.0), (slope, expected)


def test_dropout() -> None:
    launch(
        2,
        partial(check_draws_of_shards),
        partial(check_draws_of_whole_values, 7, ("zero=3",)),
        partial(check_draws_of_replicas, ("tensor=2",)),
        partial(check_recomputation, ("data=2", "zero=3", "microbatches=2")),
        partial(check_recomputation, ("tensor=2", "zero=1"), "gpt2"),
        partial(check_draws_of_replicas, ("sequence=2",), "gpt2"),
    )


def test_dropout_on_two_axes() -> None:
    launch(4, partial(check_draws_of_whole_values, 6, ("mesh=2x2", "data=2")))


def check_eval_of_dropout() -> None:
    """In eval mode nothing is dropped; back in training mode something is."""
    model, inputs = make_gpt(dropout=0.5)
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("tensor=2",))
    before = run_step(parallel, inputs)
    assert parallel.eval() is parallel
    model.eval()
    assert_same_step(parallel, model, inputs, 1e-12, 1e-9)
    assert loss_without_gradients(parallel, inputs) == loss_without_gradients(parallel, inputs)
    parallel.train()
    assert parallel.training
    assert len({before, run_step(parallel, inputs), run_step(parallel, inputs)}) == 3


def check_eval_of_batch_norm() -> None:
    """Training moves the running statistics as on one device; eval mode uses them and leaves them."""
    model, inputs = make("unet")
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("data=2",))
    for trained in (model, parallel):
        train(trained, inputs, OPTIMIZERS["adamw foreach"])
    assert parallel.get_buffer("norm1.num_batches_tracked").item() == 3
    assert_near(state_of(parallel), state_of(model), 1e-4, floor=1e-2)
    parallel.load_state_dict(model.state_dict())

    trained_loss = loss_of(model(**inputs)).item()  # moves the statistics once more
    model.load_state_dict(state_of(parallel))
    for mode in (model, parallel):
        mode.eval()
    buffers = {name: x.clone() for name, x in parallel.named_buffers()}
    assert_same_step(parallel, model, inputs)
    assert abs(loss_of(parallel(**inputs)).item() - trained_loss) > 1e-3, "statistics of the batch would not differ"
    assert_near(dict(parallel.named_buffers()), buffers, 0.0)
    for mode in (model, parallel):
        mode.train()
    assert_same_step(parallel, model, inputs)
    assert_near(dict(parallel.named_buffers()), dict(model.named_buffers()), 1e-5)


def check_model_handed_over_in_eval_mode() -> None:
    """As pretrained models come: eval mode until the loop says ``train()``."""
    model, inputs = make_gpt(dropout=0.5)
    model.eval()
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("data=2",))
    assert not parallel.training
    assert_same_step(parallel, model, inputs, 1e-12, 1e-9)
    parallel.train()
    assert len({run_step(parallel, inputs) for _ in range(3)}) == 3


def check_frozen_norm() -> None:
    """A part in eval mode within a model in training mode stays so."""
    model, inputs = make("unet")
    assert isinstance(model, models.UNet)
    model.norm1.eval()
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("data=2",))
    assert_same_step(parallel, model, inputs)
    assert_near(dict(parallel.named_buffers()), dict(model.named_buffers()), 1e-5)
    assert parallel.get_buffer("norm1.num_batches_tracked").item() == 0
    assert parallel.get_buffer("norm2.num_batches_tracked").item() == 1


def test_modes() -> None:
    launch(
        2,
        partial(check_eval_of_dropout),
        partial(check_eval_of_batch_norm),
        partial(check_model_handed_over_in_eval_mode),
        partial(check_frozen_norm),
    )


def check_not_finite(name: str, key: str, bad: float, constraints: Sequence[str]) -> None:
    """NaN and inf go where they go on one device, and the next batch is as if nothing had been."""
    model, inputs = make(name)
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=constraints)
    spoiled = inputs | {key: inputs[key].clone()}
    spoiled[key][1, 0] = bad
    expected, found = run_step(model, spoiled), run_step(parallel, spoiled)
    assert not torch.isfinite(torch.tensor(expected))
    assert str(found) == str(expected)
    wanted, got = gradients_of(model), gradients_of(parallel)
    assert any(bool(g.isnan().any()) for g in wanted.values())
    for n, gradient in wanted.items():
        assert torch.equal(got[n].isfinite(), gradient.isfinite()), n
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert str(parallel.clip_grad_norm_(1.0).item()) == str(norm.item())
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)
    model.load_state_dict(state_of(parallel))
    assert_same_step(parallel, model, inputs)


def check_nothing_counts() -> None:
    """A batch without a label: the mean over nothing is NaN, its gradient zero."""
    model, inputs = make("llama")
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=("tensor=2",))
    empty = inputs | {"labels": torch.full_like(inputs["labels"], models.IGNORED)}
    expected, found = run_step(model, empty), run_step(parallel, empty)
    assert str(expected) == str(found) == "nan"
    assert_near(gradients_of(parallel), gradients_of(model), 0.0)


class Exploding(nn.Module):
    """A loss that overflows to inf."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16] -> a scalar."""
        return self.linear(x).exp().sum()


def check_overflow() -> None:
    x = torch.full((8, 16), 1e4)
    model = Exploding()
    parallel = parallelize(copy.deepcopy(model), {"x": x}, constraints=("data=2",))
    assert run_step(model, {"x": x}) == run_step(parallel, {"x": x}) == float("inf")
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradients_of(parallel)[name], gradient)


def test_what_is_not_finite() -> None:
    launch(
        2,
        partial(check_not_finite, "contrastive", "image", float("nan"), ("data=2",)),
        partial(check_not_finite, "flat", "x", float("inf"), ("tensor=2", "zero=1")),
        partial(check_not_finite, "unet", "image", float("nan"), ("data=2",)),
        partial(check_nothing_counts),
        partial(check_overflow),
    )


def check_outputs(name: str, constraints: Sequence[str]) -> None:
    """The same containers with the same values."""
    model, inputs = make(name)
    if name == "llama":
        inputs = inputs | {"use_cache": False}  # a cache can't be carried out
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=constraints)
    expected, found = model(**inputs), parallel(**inputs)
    assert type(found) is type(expected)
    assert tree_structure(found) == tree_structure(expected)
    for got, wanted in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert got.requires_grad == wanted.requires_grad
        assert error_of(whole(got).detach(), wanted.detach()) < 1e-5
    if hasattr(expected, "keys"):
        assert list(found.keys()) == list(expected.keys())
        assert torch.equal(found["loss"], loss_of(found))


def check_other_loss(constraints: Sequence[str]) -> None:
    """The loss that the user adds to the model's own, out of an output that may lie in slices."""
    model, inputs = make("plain_gpt")
    parallel = parallelize(copy.deepcopy(model), inputs, constraints=constraints)
    for trained in (model, parallel):
        logits, loss = trained(**inputs)
        (loss + whole(logits).logsumexp(-1).square().mean()).backward()
    assert_near(gradients_of(parallel), gradients_of(model), 1e-4, floor=1e-2)


class Classifier(nn.Module):
    """No loss inside; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, 16] -> logits and features."""
        features = self.body(x)
        return self.head(features), features


def check_loss_outside(constraints: Sequence[str]) -> None:
    """The user computes the loss from the outputs, as on one device."""
    torch.manual_seed(0)
    model = Classifier()
    x, y = torch.randn(8, 16), torch.randint(0, 10, (8,))
    parallel = parallelize(copy.deepcopy(model), (x,), constraints=constraints)
    assert_same_training_by_outside_loss(parallel, model, x, y)


def test_outputs() -> None:
    launch(
        2,
        partial(check_outputs, "llama", ("tensor=2",)),
        partial(check_outputs, "plain_gpt", ("data=2",)),
        partial(check_outputs, "unet", ("data=2",)),
        partial(check_other_loss, ("data=2", "zero=3")),
        partial(check_loss_outside, ("tensor=2", "zero=1", "recompute=full")),
    )
