"""Linear recurrences written as running sums, whose sequence is split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import Subject, assert_parity, forced_plan, rehearse, trained_alone


class Recurrence(nn.Module):
    """h[t] = decay[t] h[t - 1] + x[t] by two sums along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        logs = functional.logsigmoid(self.decay(x)).cumsum(1)
        return (torch.exp(logs) * (torch.exp(-logs) * self.value(x)).cumsum(-2)).square().mean()


class Products(Recurrence):
    """The same with a product, and with sums of exponentials; some decays are zero."""

    def forward(self, x: Tensor) -> Tensor:
        decay = functional.relu(self.decay(x) + 1)
        return (decay.cumprod(1) + self.value(x).logcumsumexp(-2)).square().mean()


def subject(model: type[Recurrence]) -> Subject:
    torch.manual_seed(0)
    return trained_alone(model().double(), {"x": torch.randn(1, 8, 6, dtype=torch.float64)})


@pytest.mark.parametrize("model", [Recurrence, Products])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_slices_of_the_sequence_pass_on_their_totals(num_devices: int, model: type[Recurrence]) -> None:
    who = subject(model)
    plan = forced_plan(who.traced.program, num_devices, f"context={num_devices}")
    factors = {
        factor
        for each in plan.layers
        for op, (factor,) in zip(
            who.traced.program.kinds[each.kind].ops, plan.strategies[each.strategy].assignments, strict=True
        )
        if op.target.startswith(("aten.cum", "aten.logcum"))
    }
    assert factors == {"d1"}
    assert_parity(who, plan)
    sends = [each for each in rehearse(who, plan).collectives[0] if each.kind == "send"]
    # A total of 6 numbers; back from a product, also the gradient of what comes from the slices before.
    assert {each.num_bytes for each in sends} == ({6 * 8} if model is Recurrence else {6 * 8, 2 * 6 * 8})
