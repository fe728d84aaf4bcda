"""Experts in a loop over ``torch.where(chosen == expert)``: each computes all tokens, exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import TraceError
from autopar.trace import trace
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

NUM_EXPERTS, WIDTH = 4, 8


class Expert(nn.Module):
    """Gated, with a dropout that is off."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.dropout(self.down(functional.silu(gate) * up))


class Looped(nn.Module):
    """`call` adds up what experts make of [tokens, WIDTH], by [tokens, k] weights and experts."""

    def __init__(self, call: Callable[..., Tensor], num_chosen: int = 2) -> None:
        super().__init__()
        self.mix, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.call, self.num_chosen = call, num_chosen

    def forward(self, x: Tensor) -> Tensor:
        """A scalar of [batch, sequence, WIDTH]."""
        hidden = self.mix(x).flatten(0, 1)
        weights, chosen = self.router(hidden).softmax(-1).topk(self.num_chosen, dim=-1)
        return (hidden + self.call(self, hidden, weights, chosen)).square().mean()


def written(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        token, slot = torch.where(chosen == number)
        made[token] += expert(x[token]) * weights[token, slot, None]
    return made


def added(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    masks = functional.one_hot(chosen, NUM_EXPERTS).permute(2, 1, 0)
    made = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        slot, token = torch.where(masks[number])
        rows = expert(x.index_select(0, token)) * weights[token, slot].unsqueeze(-1)
        made.index_add_(0, token, rows.to(x.dtype))
    return made


def first_only(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    made = x.clone()
    for number, expert in enumerate(net.experts):
        (token,) = (chosen[:, 0] == number).nonzero(as_tuple=True)
        made[token] = expert(x[token]).exp()
    return made * weights[:, :1]


CALLS = {"written": (written, 2), "added": (added, 2), "first": (first_only, 1)}


@cache
def subject_of(name: str) -> Subject:
    torch.manual_seed(0)
    net = Looped(*CALLS[name]).double()
    net.router.bias.data[3] -= 50.0  # no token chooses the last one
    return trained_alone(net, {"x": torch.randn(4, 4, WIDTH, dtype=torch.float64)})


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("constraint", ["data=2", "tensor=2", "microbatches=2"])
def test_loops_train_as_on_one_device(name: str, constraint: str) -> None:
    who = subject_of(name)
    assert_parity(who, forced_plan(who.traced.program, 2, constraint), priced=False)


def test_a_note_says_what_a_loop_costs() -> None:
    (note,) = [note for note in subject_of("written").traced.program.notes if "is not zero" in note]
    assert "test_expert_loops.py" in note
    assert "as if every token chose all of them" in note


def counted(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (token,) = torch.where(chosen[:, 0] == 0)
    return x * token.numel()


def skipped(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (token,) = torch.where(chosen[:, 0] == 0)
    return x[token] if len(token) else x


def mixed(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (token,), (other,) = torch.where(chosen[:, 0] == 0), torch.where(chosen[:, 0] == 1)
    return x.index_add(0, token, x[other])


def computed(net: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    (token,) = torch.where(chosen[:, 0] == 0)
    return x[token // 2].sum()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (counted, r"test_expert_loops\.py:\d+: numel of where a mask is not zero needs a size"),
        (skipped, "len of where a mask is not zero"),
        (mixed, "index_add of where a mask is not zero"),
        (computed, "floordiv.* of where a mask is not zero"),
    ],
)
def test_what_needs_the_places_is_refused(call: Callable[..., Tensor], told: str) -> None:
    with pytest.raises(TraceError, match=told):
        trace(Looped(call), (torch.randn(4, 4, WIDTH),), {})
