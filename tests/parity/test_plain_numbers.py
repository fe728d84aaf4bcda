"""Plain numbers beside losses: ``sum(losses)``, which begins with 0, ``1 - score``, an auxiliary loss of zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.trace import trace
from tests.zoo import assert_parity, forced_plan, trained_alone

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "sum of a list": lambda h, x: sum([h.square().mean(), h.logsumexp(-1).mean()]),  # pyright: ignore
    "one less": lambda h, x: 1 - h.sigmoid().mean(),
    "less a half": lambda h, x: h.sigmoid().mean() - 0.5,
    "and a tenth": lambda h, x: h.square().mean() + 0.1,
    "twice it and a third": lambda h, x: h.square().mean() * 2 - 1 / 3,
    "a tenth less": lambda h, x: 0.1 - h.sigmoid().mean(),
    "a tenth like the hidden state": lambda h, x: h.new_full((), 0.1) + h.square().mean(),
    "zeros like the hidden state": lambda h, x: h.new_zeros(()) + h.square().mean(),
    "zeros like the loss": lambda h, x: torch.zeros_like(h.mean()) + h.square().mean(),
    "ones of other sizes": lambda h, x: (h * h.new_ones(3)[:1]).square().mean(),
}


class Head(nn.Module):
    """Two linear layers and a loss."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(8, 8), nn.Linear(8, 8), loss

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 8] -> a scalar."""
        return self.loss(self.second(self.first(x).relu()), x)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_pass(name: str) -> None:
    """Without the totals of the batch, for which all forwards would have to run before the first backward."""
    torch.manual_seed(0)
    who = trained_alone(Head(LOSSES[name]).double(), {"x": torch.randn(8, 8).double()})
    for constraints in (("microbatches=2", "data=2"), ("microbatches=4", "tensor=2")):
        assert_parity(who, forced_plan(who.traced.program, 2, *constraints), priced=False)


@pytest.mark.parametrize(
    ("dtype", "number", "is_term"),
    [
        (torch.float32, 0.1, True),
        (torch.float32, 2**30 + 1, True),  # which float32 rounds
        (torch.float32, 1e39, False),  # which is infinite in float32
        (torch.bfloat16, 0.5, True),
        (torch.bfloat16, 0.1, False),  # GPUs add it without rounding it first
    ],
)
def test_a_number_is_what_torch_adds(dtype: torch.dtype, number: float, is_term: bool) -> None:
    """As a tensor only where this is the same bits."""
    head = Head(lambda h, x: h.sigmoid().mean() + number).to(dtype)
    ops = [op for layer in trace(head, (torch.randn(8, 8, dtype=dtype),), {}).program.layers for op in layer.ops]
    added = [op for op in ops if op.target == "aten.add.Tensor"]
    assert [len(op.operands) for op in added] == [2 if is_term else 1]


def test_an_integer_keeps_all_its_digits() -> None:
    """Also one that no floating-point number has."""
    number = 2**60 + 1
    traced = trace(Head(lambda h, x: h.mean() * (x.long().new_full((), number) % 4)), (torch.randn(8, 8),), {})
    assert [int(x) for x in traced.constants.values()] == [1]
