"""Heads and losses in other words, whole and in pieces: losses of tokens, log-probabilities, z-losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ops.linear_cross_entropy import TARGET, TOKEN_LOSSES
from autopar.planning.call_traces import trace_model
from autopar.program import Program
from autopar.step.variants.logits import logits_bytes
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone

CLASSES, WIDTH, TOKENS = 24, 8, 5

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_each(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    each = functional.cross_entropy(x.view(-1, CLASSES), y.view(-1), reduction="none", label_smoothing=0.1)
    return (each.view(y.shape) * mask).sum() / mask.sum()


def of_moved_classes(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    each = functional.cross_entropy((20 * torch.tanh(x / 20)).transpose(1, 2), y, reduction="none")
    return (each * mask).sum(1).square().mean()


def with_z_loss(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return functional.cross_entropy(x.view(-1, CLASSES), y.view(-1)) + 1e-2 * x.logsumexp(-1).square().mean()


def of_preference(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """As DPO has it: chosen rows first, log-probabilities of the next tokens."""
    picked = x[:, :-1].log_softmax(-1).gather(-1, y[:, 1:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    chosen, rejected = (picked * mask[:, 1:]).sum(1).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


LOSSES: dict[str, Loss] = {
    "each token": of_each, "moved classes": of_moved_classes, "z-loss": with_z_loss, "preference": of_preference,
}  # fmt: skip
HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": functional.linear,
    "transposed": lambda x, w: x @ w.t(),
    "einsum": lambda x, w: torch.einsum("bsh,vh->bsv", x, w),
    "flat": lambda x, w: torch.mm(x.reshape(-1, WIDTH), w.mT).view(*x.shape[:2], -1),
}


class Tied(nn.Module):
    """A head with the matrix of the embedding."""

    def __init__(self, head: str, loss: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head, self.loss = HEADS[head], LOSSES[loss]

    def forward(self, ids: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.embedding(ids)))
        return self.loss(self.head(x, self.embedding.weight), y, mask)


@cache
def subject(head: str, loss: str) -> Subject:
    torch.manual_seed(0)
    ids = torch.randint(0, CLASSES, (8, 6))
    labels = ids.clone()
    labels[0, :3] = -100
    mask = (torch.rand(8, 6) < 0.7).double()
    return trained_alone(Tied(head, loss).double().train(), {"ids": ids, "y": labels, "mask": mask})


def targets(program: Program) -> list[str]:
    return [op.target for layer in program.layers for op in layer.ops]


@pytest.mark.parametrize("head", HEADS)
def test_products_with_a_transposed_matrix_are_linear(head: str) -> None:
    found = targets(subject(head, "each token").traced.program)
    assert found.count("aten.linear.default") == 2
    assert not {"aten.matmul.default", "aten.mm.default", "aten.einsum.default"} & set(found)


PLANS = (
    (2, ("tensor=2", "recompute=full")),
    (2, ("data=2", "zero=3")),
    (4, ("data=2", "tensor=2", "zero=2")),
    (2, ("sequence=2",)),
)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("head", "loss", "world", "constraints"),
    [
        *(("linear", loss, *PLANS[0]) for loss in LOSSES),
        ("transposed", "each token", *PLANS[1]),
        ("flat", "z-loss", *PLANS[1]),
        # What a loss computes of a row does not depend on how rows are divided: each takes one more plan in turn.
        *(pytest.param("einsum", loss, *PLANS[1 + n % 3], marks=pytest.mark.slow) for n, loss in enumerate(LOSSES)),
    ],
)
def test_losses_of_tokens_train_as_on_one_device(
    head: str, loss: str, world: int, constraints: tuple[str, ...]
) -> None:
    """With logits whole and in pieces."""
    whole = subject(head, loss)
    pieces = replace(whole, traced=whole.traced.in_pieces(TOKENS))
    found = targets(pieces.traced.program)
    assert TOKEN_LOSSES in found
    assert TARGET not in found
    assert "aten.linear.default" in found  # of the body
    for who in (whole, pieces):
        plan = forced_plan(who.traced.program, world, *constraints)
        assert_parity(who, plan)


def test_a_vocabulary_is_cut() -> None:
    """So that parity under tensor parallelism says something of the kernel."""
    who = subject("linear", "z-loss")
    program = who.traced.in_pieces(TOKENS).program
    plan = forced_plan(program, 2, "tensor=2")
    factors = [
        strategy.assignments[place]
        for layer, strategy in zip(program.layers, plan.decisions.layer_strategies, strict=True)
        for place, op in enumerate(layer.ops) if op.target == TOKEN_LOSSES
    ]  # fmt: skip
    assert factors == [("v",)]


def with_entropy(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    scores = x.log_softmax(-1)
    return -(scores.exp() * scores).sum(-1).mean() - scores.gather(-1, y.clamp(min=0).unsqueeze(-1)).mean()


def with_sum_of_logits(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return functional.cross_entropy(x.view(-1, CLASSES), y.view(-1)) + x.logsumexp(-1).mean() + x.square().mean()


@pytest.mark.parametrize("loss", [with_entropy, with_sum_of_logits])
def test_what_needs_all_logits_keeps_them_whole(loss: Loss) -> None:
    model = Tied("linear", "z-loss")
    model.loss = loss
    assert logits_bytes(trace_model(model, subject("linear", "z-loss").inputs).program) == 0
