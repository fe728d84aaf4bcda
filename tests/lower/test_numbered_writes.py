"""A queue whose pointer is a number in Python is written to as on one device, by one program for all places."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.lower.communication.simulated_ranks import simulate
from autopar.trace import trace
from tests.lower.runs import build
from tests.random_plans import random_plan

SIZE, ROWS = 24, 8
X = [torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in range(5)]


class Queue(nn.Module):
    """Compares with keys of earlier calls."""

    queue: Tensor
    ptr: Tensor
    first_entries: Tensor
    rows: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.register_buffer("queue", torch.randn(4, SIZE))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("first_entries", torch.zeros(SIZE))
        self.register_buffer("rows", torch.zeros(SIZE, 4))
        self.register_buffer("counts", torch.zeros(SIZE, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        q = self.fc(x)
        loss = (q @ self.queue.clone()).exp().mean()
        self.enqueue(q.detach())
        return loss

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        raise NotImplementedError


class ByInt(Queue):
    """As MoCo does."""

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        first, count = int(self.ptr), keys.shape[0]
        assert SIZE % count == 0
        self.queue[:, first : first + count] = keys.T
        self.ptr[0] = (first + count) % SIZE


class ByItem(Queue):
    """Keeps single entries, too, and wraps by arithmetic of another form."""

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        first = self.ptr.item()
        end = first + keys.shape[0]
        self.queue[..., first:end] = keys.T
        self.first_entries[first // 2 - 1] = keys[0, 0]
        self.ptr.fill_(end - SIZE * (end // SIZE))
        self.rows[first:end] = keys
        self.rows[first + 1] = keys[0]
        self.counts[first] = end  # of another dtype
        self.counts[first + 1 : first + 5] = keys[:4, 0]
        self.queue[:, self.ptr.item()] = 0.5  # of now, not of before


class Wrapped(Queue):
    """Asks whether it is at the end."""

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        first = int(self.ptr)
        self.queue[:, first : first + keys.shape[0]] = keys.T
        first += keys.shape[0]
        if first >= SIZE:
            first = 0
        self.ptr[0] = first


def results(model: Any, step: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for x in X:
        found.append(step(model, x))
    return [*found, *(x.detach().clone() for x in model.buffers())]


def _step(model: Any, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward()
    return loss.detach().clone()


@pytest.mark.parametrize("kind", [ByInt, ByItem])
@pytest.mark.parametrize("seed", range(4))
def test_calls_do_what_one_device_does(kind: type[Queue], seed: int) -> None:
    torch.manual_seed(0)
    model = kind().double()
    traced = trace(model, (X[0],), {}, training=True)
    assert not traced.questions
    expected = results(copy.deepcopy(model), _step)
    plan = random_plan(traced.program, 2, seed)

    def on_rank(communicator: Any) -> list[Tensor]:
        return results(build(copy.deepcopy(model), traced, plan, communicator), _step)

    for found in simulate(2, on_rank):
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-12)


def test_a_comparison_of_the_number_has_two_programs() -> None:
    model = Wrapped()
    (question,) = trace(model, (X[0].float(),), {}, training=True).questions
    assert question.is_truth


class Broadcast(Queue):
    """Fewer places than it says at the end, of one value."""

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        first = int(self.ptr)
        self.queue[:, first : first + 5] = keys.mean()


class Read(Queue):
    """Writes to a view."""

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        first = int(self.ptr)
        view = self.queue[:, first : first + keys.shape[0]]
        view.copy_(keys.T)


@pytest.mark.parametrize("kind", [Broadcast, Read])
def test_other_places_stay_a_program_for_each_number(kind: type[Queue]) -> None:
    (question,) = trace(kind(), (X[0].float(),), {}, training=True).questions
    assert question.names == ("ptr",)
    assert not question.is_truth
