"""Experts that count their rows, or add up their results, in other words than transformers does."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.ops.experts import EXPERTS, read_body

pytest.importorskip("transformers.integrations.moe")

from tests.parity.test_experts import NUM_EXPERTS, Routed, grouped, routing
from tests.zoo import Subject, assert_parity, forced_plan, trained_alone


class Written(Routed):
    """A balance loss reads the counts, too; `counts` and `sums` are how they are written."""

    def __init__(self, counts: str, sums: str) -> None:
        super().__init__()
        self.counts, self.sums = counts, sums
        self.router = nn.Linear(8, NUM_EXPERTS)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """A scalar."""
        hidden = self.mix(x)
        counts = self.counted(ids)
        scores = self.router(hidden).softmax(-1).mean(0)
        made = self.written(hidden, ids, weights, counts)
        return (hidden + made).square().mean() + 0.1 * (scores * counts.to(x.dtype)).sum()

    def counted(self, ids: Tensor) -> Tensor:
        if self.counts == "one-hot of each token":
            return functional.one_hot(ids, NUM_EXPERTS).sum((0, 1))
        flat = ids.view(-1)
        if self.counts == "one-hot":
            return functional.one_hot(flat, NUM_EXPERTS).sum(0)
        if self.counts == "compared":
            return (flat.unsqueeze(1) == torch.arange(NUM_EXPERTS)).sum(0)
        return torch.bincount(flat, minlength=NUM_EXPERTS)

    def written(self, hidden: Tensor, ids: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        order = ids.reshape(-1).argsort(stable=True)
        ends = counts.cumsum(0).to(torch.int32)
        token = order // ids.shape[1]
        width = hidden.shape[1]
        places = token.view(-1, 1).expand(-1, width)
        rows = grouped(hidden.gather(0, places) if self.sums == "gathered" else hidden[token], self.up, ends)
        made = grouped(functional.gelu(rows), self.down, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        if self.sums == "index_add":
            return torch.zeros_like(hidden).index_add(0, token, made)
        if self.sums == "index_add_":
            return hidden.new_zeros(hidden.shape).index_add_(0, token, made)
        if self.sums == "scatter_add":
            zeros = torch.zeros(hidden.shape, dtype=hidden.dtype)
            return zeros.scatter_add(0, places, made)
        if self.sums == "onto the residual":  # no sum from zeros on
            return hidden.index_add(0, token, made) - hidden
        if self.sums == "gathered":  # as torchtitan has it, onto what a shared expert makes
            return hidden.tanh().scatter_add(0, places, made)
        if self.sums == "written":
            unsorted = made.new_zeros(len(order), width)
            unsorted[order] = made
            return unsorted.view(*ids.shape, -1).sum(1)
        return made[order.argsort()].view(*ids.shape, -1).sum(1)


@cache
def written(counts: str, sums: str) -> Subject:
    torch.manual_seed(0)
    ids = routing("skewed")
    inputs = {"x": torch.randn(len(ids), 8).double(), "ids": ids, "weights": torch.rand(ids.shape).double()}
    return trained_alone(Written(counts, sums).double(), inputs)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("counts", "sums"), [
    ("bincount", "view"), ("one-hot", "view"), ("one-hot of each token", "index_add"), ("compared", "scatter_add"),
    ("bincount", "index_add_"), ("bincount", "onto the residual"), ("bincount", "gathered"), ("bincount", "written"),
])  # fmt: skip
def test_experts_are_found_and_shared(counts: str, sums: str) -> None:
    who = written(counts, sums)
    (op,) = [op for layer in who.traced.program.layers for op in layer.ops if op.target == EXPERTS]
    assert read_body(str(op.args[6])).summed == 2
    for constraints in (("expert=2",), ("expert=2", "data=2"), ("expert=2", "tensor=2")):
        assert_parity(who, forced_plan(who.traced.program, 2 ** len(constraints), *constraints), priced=False)
