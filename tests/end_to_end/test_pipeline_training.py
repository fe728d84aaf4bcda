"""With pipeline stages on real processes the user's own loop trains as on one device, or says why it can't."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, get_total_norm

from autopar.errors import AutoparError
from autopar.lower import ParallelModule
from autopar.verify.rehearsal import loss_of
from tests.end_to_end.harness import (
    OPTIMIZERS,
    assert_near,
    assert_same_training,
    assert_same_training_by_outside_loss,
    error_of,
    launch,
    make,
    parallelize,
    run_step,
    state_of,
    train_on,
    whole,
)
from tests.end_to_end.pipelines import all_gradients, assert_same_gradients, assert_same_step, cut, gathered

pytestmark = pytest.mark.slow

ALL_OPTIMIZERS = tuple(OPTIMIZERS)


def check_training(
    name: str, schedule: str, num_groups: int = 2, *, optimizers: tuple[str, ...] = ("adamw foreach",), **kwargs: Any
) -> None:
    """Names, values, a step, clipping and optimizers."""
    single, inputs = make(name)
    parallel = cut(copy.deepcopy(single), inputs, schedule, num_groups, **kwargs)
    assert_own_names(parallel, single)
    assert_near(state_of(parallel), state_of(single), 0.0)
    assert_same_step(parallel, single, inputs)
    assert_same_clipping(parallel, single)
    for optimizer in optimizers:
        assert_same_training(parallel, single, inputs, OPTIMIZERS[optimizer])


def assert_own_names(parallel: ParallelModule, single: nn.Module) -> None:
    """Every rank has the original's parameters, and in its state what its stages read, in the original's order."""

    def forms(model: nn.Module) -> list[Any]:
        return [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()]

    assert forms(parallel) == forms(single)
    assert all(isinstance(p, DTensor) for p in parallel.parameters())
    state = list(parallel.state_dict())
    assert state == [name for name in single.state_dict() if name in set(state)]
    assert set().union(*gathered(state)) == set(single.state_dict())
    assert len(state) < len(single.state_dict())


def assert_same_clipping(parallel: ParallelModule, single: nn.Module) -> None:
    """By the norm of all stages, what is tied counted once."""
    norm = clip_grad_norm_(single.parameters(), 1e9)
    largest = clip_grad_norm_(single.parameters(), 1e9, norm_type=torch.inf)
    assert error_of(parallel.clip_grad_norm_(1e9, norm_type=torch.inf).to(largest.dtype), largest) < 1e-5
    by_torch = get_total_norm([p.grad for p in parallel.parameters() if p.grad is not None])
    assert abs(by_torch.item() / norm.item() - 1) < 1e-5
    clip_grad_norm_(single.parameters(), norm.item() / 2)
    found = parallel.clip_grad_norm_(norm.item() / 2)
    assert len(set(gathered(found.item()))) == 1
    assert abs(found.item() / norm.item() - 1) < 1e-5
    assert_same_gradients(parallel, single)


def test_two_stages_train_as_one_device() -> None:
    launch(
        2,
        partial(check_training, "gpt2", "1f1b", optimizers=ALL_OPTIMIZERS),
        partial(check_training, "llama", "interleaved_1f1b"),
    )


def test_stages_of_two_ranks_train_as_one_device() -> None:
    launch(
        4,
        partial(check_training, "gpt2", "1f1b", constraints=("tensor=2", "zero=1"), num_microbatches=2),
        partial(check_training, "llama", "zbv", constraints=("data=2", "zero=3")),
    )


def test_four_stages_train_as_one_device() -> None:
    launch(
        4,
        partial(check_training, "gpt2", "interleaved_zero_bubble", constraints=("data=2", "zero=2")),
        partial(check_training, "llama", "1f1b", 4),
    )


def other_batch(inputs: dict[str, Any]) -> dict[str, Any]:
    return inputs | {"input_ids": inputs["input_ids"].flip(0, 1), "labels": inputs["labels"].flip(0)}


def check_loops(schedule: str) -> None:
    """Whatever order the user's loop calls forward and backward in."""
    single, inputs = make("gpt2")
    batches = (inputs, other_batch(inputs))
    parallel = cut(copy.deepcopy(single), inputs, schedule)

    for model in (single, parallel):  # gradient accumulation
        for batch in batches:
            (loss_of(model(**batch)) * 0.5).backward()
    assert_same_gradients(parallel, single)

    for model in (single, parallel):  # two forwards before one backward
        model.zero_grad()
        first, second = (loss_of(model(**batch)) for batch in batches)
        (first + 3 * second).backward()
    assert_same_gradients(parallel, single)

    for model in (single, parallel):  # and before two, the later one first; a step without a backward between
        model.zero_grad()
        first, second = (loss_of(model(**batch)) for batch in batches)
        second.backward()
        model(**inputs)
        first.backward()
    assert_same_gradients(parallel, single)

    loss = loss_of(parallel(**inputs))
    loss.backward(retain_graph=True)
    gradients = all_gradients(parallel)
    with pytest.raises(AutoparError, match=r"call the model again before each backward\(\)"):
        loss.backward()
    assert_near(all_gradients(parallel), gradients, 0.0)
    with torch.no_grad():
        assert not parallel(**inputs).loss.requires_grad
    assert_same_step(parallel, single, inputs)


def check_learning_rates() -> None:
    """Optimizers with groups of parameters, and a schedule of learning rates."""
    single, inputs = make("gpt2")
    parallel = cut(copy.deepcopy(single), inputs)
    for model in (single, parallel):
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
            {"params": [p for n, p in named if not n.endswith("bias")]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=5)
        for _ in range(4):
            optimizer.zero_grad()
            run_step(model, inputs)
            optimizer.step()
            schedule.step()
    assert_near(state_of(parallel), state_of(single), 1e-4, floor=1e-2)


class Uneven(nn.Module):
    """The first layer's gradient is 1e25 times that of the others."""

    def __init__(self, *, has_loss: bool = True) -> None:
        super().__init__()
        self.has_loss = has_loss
        generator = torch.Generator().manual_seed(0)
        self.tiny = nn.Parameter(torch.randn(16, 16, generator=generator) * 1e-25)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16] -> a scalar, or the same shape."""
        x = x @ (self.tiny * 1e25)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean() if self.has_loss else x


def check_scaler(*, has_loss: bool = True, **kwargs: Any) -> None:
    """Where one stage's gradients overflow, all ranks skip the step; the next one is as on one device."""
    torch.manual_seed(0)
    single, x = Uneven(has_loss=has_loss), torch.randn(8, 16)
    parallel = cut(copy.deepcopy(single), (x,), **kwargs)
    before = state_of(parallel)
    for scale, skips in ((2.0**50, True), (2.0**4, False)):
        norms: list[Tensor] = []
        for model in (single, parallel):
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            loss = model(x) if has_loss else model(x).square().mean()
            scaler.scale(loss).backward()
            if skips and model is parallel:
                assert "inf" in str(all_gradients(parallel)["tiny"].abs().max())
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model.parameters(), 1e30, torch.inf, foreach=skips))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (scale / 2 if skips else scale)
            model.zero_grad()
        assert skips or error_of(norms[1], norms[0]) < 1e-5
        after = state_of(parallel)
        assert_near(after, state_of(single), 1e-5)
        assert all(torch.equal(after[n], before[n]) for n in after) == skips


def check_frozen() -> None:
    """Transfer learning with a stage that trains nothing: filters, clipping and scalers run as on the other ranks."""
    single, inputs = make("deep_half_frozen")
    parallel = cut(copy.deepcopy(single), inputs)
    trained = [p.to_local() for p in parallel.parameters() if p.requires_grad]
    assert any(part.numel() for part in trained) == (dist.get_rank() == 1)
    losses: list[list[float]] = []
    for model in (single, parallel):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model(**inputs))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            losses[-1].append(loss.item())
        assert scaler.get_scale() == 8.0
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert_near(state_of(parallel), state_of(single), 1e-4, floor=1e-2)
    assert str(parallel.load_state_dict(single.state_dict())) == "<All keys matched successfully>"


def test_the_users_own_loop() -> None:
    launch(
        2,
        partial(check_frozen),
        partial(check_loops, "zbv"),
        partial(check_learning_rates),
        partial(check_scaler),
        partial(check_scaler, has_loss=False, schedule="gpipe", num_microbatches=1),
    )


class Scaled(nn.Module):
    """A parameter that two stages read, or one: where stages are cut follows the form of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Parameter(torch.randn(6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 6] -> a scalar."""
        x = (x * self.first).tanh()
        x = (x + self.shared).sin() * self.shared
        return (x * self.last).square().mean()


def check_stages_that_share_a_parameter_in_some_calls() -> None:
    torch.manual_seed(0)
    single, x = Scaled(), torch.linspace(-1, 1, 48).view(8, 6)
    parallel = parallelize(copy.deepcopy(single), (x,), constraints=("pipeline=2", "microbatches=2"))
    assert len(parallel.plan.stages) == 2
    for inputs in (x, x.double(), x):
        assert_same_step(parallel, single, {"x": inputs})


def test_stages_that_share_a_parameter_in_some_calls() -> None:
    launch(2, check_stages_that_share_a_parameter_in_some_calls, timeout_s=120)


class Chain(nn.Module):
    """Residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16] -> the same."""
        for block in self.blocks:
            x = x + block(x)
        return x


class Classifier(nn.Module):
    """No loss inside; two outputs, of different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, 16] -> logits and features."""
        features = x
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            features = x if number == 0 else features
        return self.head(x), features


def check_loss_outside() -> None:
    """GPipe under autograd: the user computes the loss from outputs of several stages."""
    torch.manual_seed(0)
    single, x, y = Classifier(), torch.randn(8, 16), torch.randint(0, 10, (8,))
    parallel = cut(copy.deepcopy(single), (x,), "gpipe", num_microbatches=1)
    assert_same_training_by_outside_loss(parallel, single, x, y)
    logits, _ = parallel(x)
    logits.sum().backward(retain_graph=True)
    with pytest.raises(AutoparError, match=r"call the model again before each backward\(\)"):
        logits.sum().backward()


def check_outputs() -> None:
    """The loss is everywhere, other outputs where they are read, or on the ranks of their stage if asked for."""
    single, inputs = make("llama")
    inputs |= {"use_cache": False}  # a cache can't be carried out
    expected = single(**inputs)
    parallel = cut(copy.deepcopy(single), inputs)
    owner = dist.get_rank() == dist.get_world_size() - 1
    logits = parallel(**inputs).logits
    assert error_of(logits.detach(), expected.logits.detach()) < 1e-5
    parallel.whole_outputs = False
    for no_grad in (False, True):
        with torch.set_grad_enabled(not no_grad):
            found = parallel(**inputs)
        assert found.loss.requires_grad != no_grad
        assert error_of(found.loss.detach(), expected.loss.detach()) < 1e-6
        assert (found.logits is not None) == owner
        if owner:
            assert error_of(whole(found.logits).detach(), expected.logits.detach()) < 1e-5
    parallel.whole_outputs = True
    logits = parallel(**inputs).logits
    assert type(logits) is Tensor
    assert error_of(logits, expected.logits.detach()) < 1e-5
    assert_same_step(parallel, single, inputs)


def check_buffers() -> None:
    """Running statistics of all stages move on every rank as on one device."""
    single, inputs = make("deep_batch_normed")
    parallel = cut(copy.deepcopy(single), inputs, "gpipe", num_microbatches=1)
    for _ in range(2):
        assert_same_step(parallel, single, inputs)
    assert_near(dict(parallel.named_buffers()), dict(single.named_buffers()), 1e-5)
    assert {x.item() for n, x in parallel.named_buffers() if n.endswith("num_batches_tracked")} == {2}


def check_evaluation(name: str, schedule: str, **kwargs: Any) -> None:
    """eval() runs forward only, on the stages that have the parameters, and train() goes on as before."""
    single, inputs = make(name)
    parallel = cut(copy.deepcopy(single), inputs, schedule, **kwargs)
    for model in (single, parallel):
        run_step(model, inputs)
        model.eval()
    with torch.no_grad():
        expected = single(**inputs)
        loss, logits = _read(parallel(**inputs))
        assert error_of(loss, _read(expected)[0]) < 1e-6
        assert type(logits) is Tensor
        assert error_of(logits, _read(expected)[1]) < 1e-5
        parallel.whole_outputs = False
        _, logits = _read(parallel(**inputs))
        assert (logits is not None) == (parallel.plan.stages[-1].group == dist.get_rank())
        parallel.whole_outputs = None
    for model in (single, parallel):
        model.train()
    assert_same_step(parallel, single, inputs)
    assert_near(state_of(parallel), state_of(single), 1e-5)


def _read(output: Any) -> tuple[Tensor, Any]:
    """Loss and logits."""
    return output if isinstance(output, tuple) else (output.loss, output.logits)


def check_loss_function() -> None:
    """`loss_fn=` in stages that the search cuts; eval mode gives the outputs on every rank where there is no target."""
    torch.manual_seed(0)
    single, x, y = Chain(), torch.randn(8, 16), torch.randn(8, 16)
    parallel = parallelize(
        copy.deepcopy(single), (x,), loss_fn=functional.mse_loss, example_target=y,
        constraints=("pipeline=2", "schedule=1f1b", "microbatches=4"),
    )  # fmt: skip
    for _ in range(2):
        expected, found = functional.mse_loss(single(x), y), parallel(x, target=y)
        assert error_of(found.detach(), expected.detach()) < 1e-6
        expected.backward()
        found.backward()
        assert_same_gradients(parallel, single)
    parallel.eval()
    with torch.no_grad():
        assert error_of(parallel(x), single(x)) < 1e-5
        assert error_of(parallel(x, target=y), functional.mse_loss(single(x), y)) < 1e-6


def test_evaluation() -> None:
    launch(
        2,
        partial(check_evaluation, "gpt2", "1f1b"),
        partial(check_evaluation, "llama", "zbv"),
        partial(check_evaluation, "deep_batch_normed", "gpipe", num_microbatches=1),
        partial(check_loss_function),
    )


def test_outputs_and_buffers() -> None:
    launch(
        2,
        partial(check_loss_outside),
        partial(check_outputs),
        partial(check_buffers),
    )


def check_checkpoints(folder: str) -> None:
    """A single device's checkpoint goes in; what a pipeline saves is loaded without one, and the other way round."""
    single, inputs = make("gpt2")
    staged = cut(copy.deepcopy(single), inputs)
    whole_model = parallelize(copy.deepcopy(single), inputs, constraints=("data=2", "zero=3"))
    for number, (source, target) in enumerate(((staged, whole_model), (whole_model, staged))):
        generator = torch.Generator().manual_seed(number)
        checkpoint = {n: x + torch.randn(x.shape, generator=generator) / 10 for n, x in single.state_dict().items()}
        checkpoint["lm_head.weight"] = checkpoint["transformer.wte.weight"]
        assert str(source.load_state_dict(checkpoint)) == "<All keys matched successfully>"
        full = source.full_state_dict()
        assert_near(full, checkpoint, 0.0)
        dcp.save({"model": source.state_dict()}, checkpoint_id=f"{folder}{number}")
        state = target.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"{folder}{number}")
        target.load_state_dict(state)
        assert_near(target.full_state_dict(), checkpoint, 0.0)
        single.load_state_dict(checkpoint)
        assert_same_step(target, single, inputs)
    with pytest.raises(RuntimeError, match=r"wte\.weight" if dist.get_rank() == 0 else r"wte\.weight|lm_head"):
        staged.load_state_dict({n: x for n, x in single.state_dict().items() if "wte" not in n and "lm_head" not in n})


def check_resuming(folder: str) -> None:
    """Model and optimizer, saved by a pipeline after two steps, go on without one as if nothing had happened."""
    single, inputs = make("llama")
    staged = cut(copy.deepcopy(single), inputs, "zbv")
    optimizer = OPTIMIZERS["adamw foreach"](staged.parameters())
    train_on(staged, optimizer, inputs, 2)
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    state, optimizer_state = get_state_dict(staged, optimizer, options=by_name)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    expected = train_on(staged, optimizer, inputs, 2)

    for resumed in (parallelize(single, inputs, constraints=("tensor=2",)), cut(single, inputs, "1f1b", cuts=(2,))):
        optimizer = OPTIMIZERS["adamw foreach"](resumed.parameters())
        state, optimizer_state = get_state_dict(resumed, optimizer, options=by_name)
        loaded = {"model": state, "optimizer": optimizer_state}
        dcp.load(loaded, checkpoint_id=folder)
        state, optimizer_state = loaded["model"], loaded["optimizer"]
        set_state_dict(resumed, optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=by_name)
        assert train_on(resumed, optimizer, inputs, 2) == pytest.approx(expected, rel=1e-5)


def test_checkpoints(tmp_path: Path) -> None:
    launch(2, partial(check_checkpoints, str(tmp_path / "model")), partial(check_resuming, str(tmp_path / "all")))
