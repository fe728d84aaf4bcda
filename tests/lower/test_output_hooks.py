"""A hook on an output's gradient sees all of it, or backward says that it would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import OutputError
from autopar.planning.call_traces import trace_model
from autopar.verify.rehearsal import run_ranks
from tests.zoo import forced_plan


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """[batch, 8], [batch] -> logits and what is made of them."""
        logits = self.head(self.body(x).tanh())
        return {"logits": logits, "loss": functional.cross_entropy(logits, y)}


INPUTS = {"x": torch.randn(8, 8, dtype=torch.float64), "y": torch.arange(8) % 4}
CONSTRAINTS = ("data=2", "tensor=2", "microbatches=2")


def on_ranks(check: Callable[[Any], None], constraint: str) -> None:
    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = Classifier().double()
    traced = trace_model(model, INPUTS)
    run_ranks(model, traced, forced_plan(traced.program, 2, constraint), check)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("hook", [lambda x: x.register_hook(lambda g: 2 * g), lambda x: x.retain_grad()])
def test_a_hook_that_would_miss_the_gradient_of_the_loss_is_an_error(constraint: str, hook: Any) -> None:
    def check(model: Any) -> None:
        out = model(**INPUTS)
        hook(out["logits"])
        with pytest.raises(OutputError, match=r"has a hook on its gradient.*Compute the loss of '\w+' outside"):
            out["loss"].backward()

    on_ranks(check, constraint)


def test_a_hook_that_sees_all_of_the_gradient_is_called() -> None:
    def check(model: Any) -> None:
        seen: list[Tensor] = []
        logits = model(**INPUTS)["logits"]
        logits.register_hook(seen.append)
        logits.retain_grad()
        logits.square().sum().backward()
        torch.testing.assert_close(seen[0], 2 * logits.detach())
        torch.testing.assert_close(logits.grad, 2 * logits.detach())

    on_ranks(check, "data=2")


def test_hooks_on_the_loss_are_called() -> None:
    def check(model: Any) -> None:
        seen: list[Tensor] = []
        loss = model(**INPUTS)["loss"]
        loss.register_hook(seen.append)
        (3 * loss).backward()
        assert [float(g) for g in seen] == [3.0]

    on_ranks(check, "tensor=2")
