"""A forward that branches on its buffers does in each call what one device does with the values of then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError, TraceError
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run.buffer_answers import BufferAnswers
from autopar.objects.buffer_questions import BufferQuestion
from autopar.plan import Plan
from autopar.planning.building import call_planner
from autopar.trace import Traced, trace
from autopar.verify.rehearsal import loss_of
from tests.lower.runs import build
from tests.random_plans import random_plan

X = torch.arange(64, dtype=torch.float64).view(8, 8) / 16


class Warmed(nn.Module):
    """Has a counter of calls that it compares, a flag with which it sets a codebook once, and an average."""

    step: Tensor
    initted: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.warmup = 2
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("initted", torch.tensor([False]))
        self.register_buffer("codes", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training and not self.initted:
            self.codes.data.copy_(x.detach().mean(0))
            self.initted.data.copy_(torch.Tensor([True]))
        if self.step.item() < self.warmup:
            x = x * 0.5
        if self.training:
            self.step += 1
            self.codes.lerp_(x.detach().mean(0), 0.25)
        return self.last((x - self.codes).tanh())


@cache
def traced_model() -> tuple[Warmed, Traced]:
    torch.manual_seed(0)
    model = Warmed().double()
    return model, trace(model, (X,), {}, training=True)


def buffers(step: int, *, is_set: bool) -> dict[str, Tensor]:
    return {"step": torch.tensor(step), "initted": torch.tensor([is_set]), "codes": torch.zeros(8)}


STATES = [(True, 0, False), (True, 1, True), (True, 2, True), (False, 0, False), (False, 2, False)]


def on_ranks(action: Callable[[Any], Any], plan: Plan | None = None) -> list[Any]:
    """What `action` of the model gives on each of two ranks."""
    model, traced = traced_model()
    plan = plan or random_plan(traced.program, 2, 0)
    planner = call_planner(model, traced, plan)
    for mode, step, is_set in STATES:  # ranks are threads, and tracing is for one at a time
        planner((X,), {}, mode, buffers=buffers(step, is_set=is_set))
    return simulate(2, lambda communicator: action(build(model, traced, plan, communicator, planner=planner)))


def results(model: Any) -> list[Tensor]:
    """Losses of training steps, through both branches, and of an evaluation; the state at the end."""
    found: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(times: int) -> None:
        for _ in range(times):
            optimizer.zero_grad()
            loss = loss_of(model(X))
            loss.backward()
            optimizer.step()
            found.append(loss.detach())

    train(4)
    model.step.fill_(0)  # in place
    train(1)
    model.initted.data.copy_(torch.tensor([False]))  # which counts no version
    train(1)
    model.load_state_dict({**model.state_dict(), "step": torch.tensor(0), "initted": torch.tensor([False])})
    train(1)
    model.eval()
    with torch.no_grad():
        found.append(model(X) + 0)
        model.step = torch.tensor(5)
        found.append(model(X) + 0)
    model.train()
    train(1)
    return [*found, *(x.detach().clone() for x in model.buffers())]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("seed", range(3))
def test_calls_do_what_one_device_does(seed: int) -> None:
    model, traced = traced_model()
    expected = results(copy.deepcopy(model))

    def on_rank(parallel: Any) -> tuple[list[Tensor], int]:
        found = results(parallel)
        return found, len(parallel.plans)

    for found, count in on_ranks(on_rank, random_plan(traced.program, 2, seed)):
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)
        assert count == len(STATES)  # answers that were seen plan nothing


def test_without_a_planner_other_answers_are_refused() -> None:
    model, traced = traced_model()
    plan = random_plan(traced.program, 2, 0)

    def on_rank(communicator: Any) -> None:
        parallel = build(model, traced, plan, communicator)
        parallel(X)
        with pytest.raises(ModelError, match="what forward asked of them; now buffer 'initted'"):
            parallel(X)

    simulate(2, on_rank)


class Scaled(nn.Module):
    """Computes with the number of a buffer."""

    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.step.item()


def answers_of(model: Scaled) -> tuple[BufferAnswers, Callable[[int, int], None]]:
    """Of a module that runs; and what has it run a program for `number`, so many times."""
    answers = BufferAnswers(model)

    def run(number: int, times: int) -> None:
        answers.check()
        model.step.fill_(number)
        (question,) = trace(model, (X,), {}).questions
        answers.watch([question])
        for _ in range(times):
            answers.count([question])

    return answers, run


def test_a_number_that_is_another_in_every_call_is_refused() -> None:
    model = Scaled().double()
    _, run = answers_of(model)
    for number in range(8):
        run(number, 1)
    with pytest.raises(TraceError, match=r"buffer 'step', which was 8 different numbers in 8 calls.*x \* self.buffer"):
        run(8, 1)


def test_a_number_that_changes_now_and_then_is_planned_for() -> None:
    model = Scaled().double()
    _, run = answers_of(model)
    for number in range(10):
        run(number, 5)


def test_buffers_that_nothing_wrote_to_are_not_asked_again() -> None:
    model = nn.Module()
    model.register_buffer("step", torch.zeros(32))  # too many entries to compare them
    times: list[int] = []

    class Computation:
        def known(self, tensors: Any) -> Any:
            times.append(1)
            return (), (bool(tensors[0].sum() > 0),), torch.bool

    answers, question = BufferAnswers(model), BufferQuestion(("step",), Computation(), "here", (False,))
    for _ in range(3):
        assert answers.are_known([question])
    assert len(times) == 1
    model.get_buffer("step").add_(1)
    assert not answers.are_known([question])
    model.step = torch.zeros(32)
    assert answers.are_known([question])
    assert len(times) == 3
