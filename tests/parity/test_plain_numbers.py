"""Plain numbers beside losses: ``sum(losses)``, which begins with 0, ``1 - score``, an auxiliary loss of zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import assert_parity, forced_plan, trained_alone

Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "sum of a list": lambda h, x: sum([h.square().mean(), h.logsumexp(-1).mean()]),  # pyright: ignore
    "one less": lambda h, x: 1 - h.sigmoid().mean(),
    "less a half": lambda h, x: h.sigmoid().mean() - 0.5,
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
