"""Experts written by hand with a capacity, as one-hot masks (GShard) or as buffers: ordinary ops, trained exactly."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ops.experts import EXPERTS
from autopar.planning.call_traces import trace_model
from tests.random_plans import random_plan
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

NUM_EXPERTS, CAPACITY, WIDTH = 4, 6, 8


class Capacity(nn.Module):
    """Each expert takes the first rows that choose it, as many as its capacity; the loss has balance and z terms."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 16) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 16, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        logits = self.router(x)
        probabilities = logits.softmax(-1)
        weight, chosen = probabilities.max(-1)
        mask = functional.one_hot(chosen, NUM_EXPERTS)
        place = mask.cumsum(0) * mask - 1  # -1: not chosen
        balance = NUM_EXPERTS * (mask.to(x.dtype).mean(0) * probabilities.mean(0)).sum()
        z = logits.logsumexp(-1).square().mean()
        made = self.experts(x, mask, place, weight)
        return (x + made).square().mean() + 0.01 * balance + 0.001 * z

    def experts(self, x: Tensor, mask: Tensor, place: Tensor, weight: Tensor) -> Tensor:
        """One-hot dispatch and combine masks."""
        kept = functional.one_hot(place.clamp(min=0), 32)[..., :CAPACITY] * mask.unsqueeze(-1)
        dispatch = kept.to(x.dtype)
        rows = torch.einsum("tec,td->ecd", dispatch, x)
        made = torch.bmm(functional.gelu(torch.bmm(rows, self.up)), self.down)
        return torch.einsum("tec,ecd->td", dispatch * weight.view(-1, 1, 1), made)


class Buffered(Capacity):
    """The same with rows that are put into a buffer: the last place of it takes what is dropped."""

    def experts(self, x: Tensor, mask: Tensor, place: Tensor, weight: Tensor) -> Tensor:
        own = place.max(-1).values
        slot = torch.where(own < CAPACITY, mask.argmax(-1) * CAPACITY + own, NUM_EXPERTS * CAPACITY)
        buffer = x.new_zeros(NUM_EXPERTS * CAPACITY + 1, WIDTH).index_copy(0, slot, x)
        rows = buffer[:-1].view(NUM_EXPERTS, CAPACITY, WIDTH)
        made = torch.bmm(functional.gelu(torch.bmm(rows, self.up)), self.down).view(-1, WIDTH)
        made = torch.cat([made, x.new_zeros(1, WIDTH)])
        return made[slot] * weight.unsqueeze(-1)


@cache
def capacity(form: type[Capacity], routing: str) -> Subject:
    torch.manual_seed(0)
    model, x = form().double(), torch.randn(32, WIDTH).double()
    if routing != "spread":
        model.router.bias.data[2] += 3.0 if routing == "skewed" else 50.0
    return trained_alone(model, {"x": x})


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("form", "routing", "constraints"),
    [
        (Capacity, "spread", ()),
        (Capacity, "skewed", ("data=2",)),
        (Capacity, "all to one", ("zero=3",)),
        pytest.param(Buffered, "skewed", ("data=2",), marks=pytest.mark.slow),
    ],
)
def test_capacity_forms_are_ordinary_ops_that_train_as_on_one_device(
    form: type[Capacity], routing: str, constraints: tuple[str, ...]
) -> None:
    who = capacity(form, routing)
    program = who.traced.program
    assert not [op for layer in program.layers for op in layer.ops if op.target == EXPERTS]
    plan = forced_plan(program, 2, *constraints)
    assert_parity(who, plan, priced=False)
    assert_parity(who, random_plan(program, 4, len(constraints)), priced=False)


class Checked(Capacity):
    """It raises where a row would be dropped."""

    def experts(self, x: Tensor, mask: Tensor, place: Tensor, weight: Tensor) -> Tensor:
        if (place >= CAPACITY).any():
            raise ValueError("capacity")
        return super().experts(x, mask, place, weight)


def test_a_check_of_the_capacity_is_left_out_with_a_note() -> None:
    """As every check of values; rows beyond the capacity are dropped, as they are without it."""
    program = trace_model(Checked(), {"x": torch.zeros(32, WIDTH)}).program
    (note,) = [note for note in program.notes if "this check of values is left out" in note]
    assert "test_expert_forms.py" in note
