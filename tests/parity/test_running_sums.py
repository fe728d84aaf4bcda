"""Linear recurrences written as running sums, whose sequence is split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.search import SearchRequest, search
from tests.zoo import Subject, assert_parity, quick_prices, rehearse, trained_alone


class Recurrence(nn.Module):
    """h[t] = decay[t] h[t - 1] + x[t] by two sums along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        logs = functional.logsigmoid(self.decay(x)).cumsum(1)
        return (torch.exp(logs) * (torch.exp(-logs) * self.value(x)).cumsum(-2)).square().mean()


def subject() -> Subject:
    torch.manual_seed(0)
    return trained_alone(Recurrence().double(), {"x": torch.randn(1, 8, 6, dtype=torch.float64)})


@pytest.mark.parametrize("num_devices", [2, 4])
def test_slices_of_the_sequence_pass_on_their_totals(num_devices: int) -> None:
    who = subject()
    request = SearchRequest(constraints=(f"context={num_devices}",))
    plan = search(who.traced.program, num_devices, quick_prices(num_devices), request)
    factors = {
        factor
        for each in plan.layers
        for op, (factor,) in zip(
            who.traced.program.kinds[each.kind].ops, plan.strategies[each.strategy].assignments, strict=True
        )
        if "cumsum" in op.target
    }
    assert factors == {"d1"}
    assert_parity(who, plan)
    sends = [each for each in rehearse(who, plan).collectives[0] if each.kind == "send"]
    assert {each.num_bytes for each in sends} == {6 * 8}  # a total of 6 numbers
