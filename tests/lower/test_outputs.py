"""Outputs beside the loss are whole plain tensors: in eval mode at once, in training when they are read."""

from __future__ import annotations

import copy
import pickle
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.lower import ParallelModule
from autopar.lower.communication.simulated_ranks import CollectiveMismatchError, simulate
from autopar.plan import Plan
from autopar.trace import Traced, trace
from tests.lower.runs import build
from tests.models import make
from tests.random_plans import random_plan, with_stages


@cache
def traced_model(name: str) -> tuple[nn.Module, dict[str, Any], Traced]:
    model, inputs = make(name)
    return model, inputs, trace(model, (), inputs)


def plans(name: str, num_microbatches: int = 1) -> list[Plan]:
    """Without and with stages."""
    program = traced_model(name)[2].program
    found = [random_plan(program, 4, seed, num_microbatches) for seed in range(2)]
    return [*found, with_stages(random_plan(program, 2, 3, 2), 2, "1f1b", 2, random.Random(0))]


def on_ranks(name: str, plan: Plan, action: Any) -> list[Any]:
    model, inputs, traced = traced_model(name)
    return simulate(plan.world_size, lambda c: action(build(model, traced, plan, c), inputs))


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_outputs_of_training_are_read_as_on_one_device(num_microbatches: int) -> None:
    model, inputs, _ = traced_model("plain_gpt")
    expected, _ = model(**inputs)
    targets = inputs["targets"]

    def read(parallel: Any, inputs: Any) -> tuple[Tensor, ...]:
        logits, loss = parallel(**inputs)
        assert not isinstance(logits, DTensor)
        assert (logits.shape, logits.dtype, len(logits)) == (expected.shape, expected.dtype, len(expected))
        correct = logits.argmax(-1) == targets
        loss.backward()
        return logits.detach(), correct, logits[1:, -1].detach(), torch.cat([logits, logits]).detach()

    for plan in plans("plain_gpt", num_microbatches):
        for found, correct, part, twice in on_ranks("plain_gpt", plan, read):
            assert type(found) is Tensor
            torch.testing.assert_close(found, expected.detach(), rtol=1e-11, atol=1e-12)
            assert torch.equal(correct, expected.argmax(-1) == targets)
            torch.testing.assert_close(part, found[1:, -1], rtol=0, atol=0)
            torch.testing.assert_close(twice, torch.cat([found, found]), rtol=0, atol=0)


def test_nothing_is_gathered_that_nobody_reads() -> None:
    def count(parallel: Any, inputs: Any) -> tuple[int, int, int]:
        with parallel.recording() as unread:
            logits, _ = parallel(**inputs)
            assert logits.shape[0] == len(inputs["ids"])
        with parallel.recording() as read:
            pickle.loads(pickle.dumps(logits))
        with parallel.recording() as again:
            logits.sum()
        parallel.whole_outputs = False
        with parallel.recording() as cut:
            parallel(**inputs)
        assert len(unread) == len(cut)
        return len(unread), len(read), len(again)

    assert any(read for plan in plans("plain_gpt") for _, read, _ in on_ranks("plain_gpt", plan, count))
    assert not any(again for plan in plans("plain_gpt") for _, _, again in on_ranks("plain_gpt", plan, count))


def test_reading_on_some_ranks_only_is_an_error() -> None:
    def read(parallel: Any, inputs: Any) -> None:
        logits, _ = parallel(**inputs)
        if parallel._communicator.rank == 0:
            logits.sum()
        parallel(**inputs)

    with pytest.raises(CollectiveMismatchError):
        on_ranks("plain_gpt", plans("plain_gpt")[-1], read)


@pytest.mark.parametrize("whole_outputs", [None, True])
def test_gradients_come_through_outputs_beside_the_loss(whole_outputs: bool | None) -> None:
    model, inputs, _ = traced_model("plain_gpt")

    def step(model: Any) -> None:
        logits, loss = model(**inputs)
        with torch.no_grad():
            logits.argmax(-1)
        (loss + 0.1 * logits.square().mean() + logits[:, 0].sum()).backward()

    single = copy.deepcopy(model)
    step(single)

    def gradients(parallel: Any, _: Any) -> dict[str, Tensor]:
        parallel.whole_outputs = whole_outputs
        step(parallel)
        return {name: parallel._whole(name, p.grad) for name, p in parallel.named_parameters()}

    for plan in plans("plain_gpt")[:-1]:
        for found in on_ranks("plain_gpt", plan, gradients):
            for name, parameter in single.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-10)


def test_outputs_in_eval_mode_are_plain_and_whole_on_every_rank() -> None:
    model, inputs, _ = traced_model("plain_gpt")
    expected, expected_loss = model(**inputs)

    def evaluate(parallel: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return parallel.eval()(**inputs)

    for plan in plans("plain_gpt"):
        for logits, loss in on_ranks("plain_gpt", plan, evaluate):
            assert type(logits) is Tensor
            torch.testing.assert_close(logits, expected.detach(), rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-11, atol=0)


def test_outputs_in_eval_mode_that_memory_does_not_hold_are_gathered_when_they_are_read() -> None:
    model, inputs, _ = traced_model("plain_gpt")
    expected, expected_loss = model(**inputs)

    def evaluate(parallel: Any, inputs: Any) -> tuple[int, int, Tensor, Tensor]:
        with torch.no_grad(), parallel.recording() as unread:
            logits, loss = parallel.eval()(**inputs)
        with parallel.recording() as read:
            logits = logits.clone()
        return len(unread), len(read), logits, loss

    reads = 0
    for plan in plans("plain_gpt"):
        fits = on_ranks("plain_gpt", plan, evaluate)
        small = replace(plan, memory_limit_bytes=expected.numel() * expected.element_size() - 1.0)
        for found, (before, _, _, _) in zip(on_ranks("plain_gpt", small, evaluate), fits, strict=True):
            unread, read, logits, loss = found
            assert unread < before if read else unread == before
            reads += read
            assert type(logits) is Tensor
            torch.testing.assert_close(logits, expected.detach(), rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-11, atol=0)
    assert reads


class _Penalized(nn.Module):
    """Returns a scalar beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make("plain_gpt")[0]

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits, loss = self.inner(ids, targets)
        penalty = logits.square().mean()
        return loss + penalty, penalty


def test_a_scalar_beside_the_loss_is_read_on_every_stage() -> None:
    model, inputs = _Penalized(), make("plain_gpt")[1]
    traced = trace(model, (), inputs)
    expected = float(model(**inputs)[1].detach())
    plan = with_stages(random_plan(traced.program, 2, 0), 2, "gpipe", 2, random.Random(0))

    def read(parallel: Any) -> tuple[bool, float]:
        _, penalty = parallel(**inputs)
        return type(penalty) is Tensor, float(penalty.detach())

    found = simulate(4, lambda c: read(build(model, traced, plan, c)))
    assert [value for _, value in found] == pytest.approx([expected] * 4, rel=1e-12)
    assert not all(is_plain for is_plain, _ in found)


def test_what_is_read_is_named_with_its_call() -> None:
    named: list[str] = []

    def read(parallel: Any, inputs: Any) -> None:
        def enter(kind: str, *args: Any) -> Any:
            named.append(kind)
            return ParallelModule._enter(parallel, kind, *args)

        object.__setattr__(parallel, "_enter", enter)  # its class may be older than this test
        with torch.no_grad():
            logits, _ = parallel(**inputs)
        logits.sum()

    on_ranks("plain_gpt", plans("plain_gpt")[-1], read)
    assert any(
        re.fullmatch(r"reading output '\w+' of a training step without gradients \({}\)", each) for each in named
    )


class ReturnsWhatItHas(nn.Module):
    """Returns a constant, a parameter, a buffer and a number, and gives one buffer a constant, another a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("cleared", torch.ones(4))
        self.register_buffer("copied", torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(self.cleared, Tensor)
        assert isinstance(self.copied, Tensor)
        assert isinstance(self.kept, Tensor)
        y = self.linear(x)
        self.cleared.zero_()
        self.copied.copy_(self.linear.bias.detach())
        return y, torch.zeros(x.shape[0], dtype=torch.long), self.linear.weight, self.kept, torch.tensor(2.5)


def test_a_model_returns_what_it_has() -> None:
    torch.manual_seed(0)
    model, x = ReturnsWhatItHas(), torch.randn(8, 4)
    traced = trace(model, (x,), {})
    expected = copy.deepcopy(model)(x)

    def run(communicator: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        parallel = build(model, traced, plan, communicator)
        outputs = parallel(x)
        outputs[2].sum().backward()
        gradient = parallel.linear.weight.grad
        return [y + 0 for y in outputs] + [parallel._whole("linear.weight", gradient)], dict(parallel.named_buffers())

    for seed in range(2):
        plan = random_plan(traced.program, 2, seed)
        for found, buffers in simulate(2, run):
            for a, b in zip(found, (*expected, torch.ones(4, 4)), strict=True):
                torch.testing.assert_close(a.detach(), b.detach())
            assert buffers["cleared"].sum() == 0
            torch.testing.assert_close(buffers["copied"], model.linear.bias.detach())
