"""Which output of a model is its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.trace import trace, without_loss

RETURNS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], int]] = {  # the place of the loss; -1: none
    "one number": (lambda y, a, b: (y, a), 1),
    "called loss": (lambda y, a, b: {"aux": a, "loss": b}, 1),
    "a sum of all others": (lambda y, a, b: (a, a + 2 * b, b), 1),
    "of others that are detached": (lambda y, a, b: {"first": a, "second": b.detach()}, 0),
    "several that only the caller adds up": (lambda y, a, b: {"first": a, "second": b}, -1),
    "a sum of some": (lambda y, a, b: (a + b, a, b, y.sum()), -1),
    "none": (lambda y, a, b: y, -1),
}


class Returns(nn.Module):
    def __init__(self, outputs: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.outputs, self.fc = outputs, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        return self.outputs(y, y.abs().mean(), y.square().mean())


@pytest.mark.parametrize("case", RETURNS)
def test_the_loss_is_found(case: str) -> None:
    outputs, expected = RETURNS[case]
    program = trace(Returns(outputs), (torch.ones(2, 4),), {}, training=True).program
    assert program.loss == (program.outputs[expected] if expected >= 0 else "")
    is_told = any("returns several losses" in note for note in program.notes)
    assert is_told == (case.startswith("several") or case == "a sum of some")


def test_a_program_without_its_loss_is_another_one() -> None:
    program = trace(Returns(RETURNS["one number"][0]), (torch.ones(2, 4),), {}, training=True).program
    made = without_loss(program)
    assert (made.loss, made.outputs, made.layers) == ("", program.outputs, program.layers)
    assert made.fingerprint != program.fingerprint
    assert without_loss(made) is made
