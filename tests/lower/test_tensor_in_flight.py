"""Tensors that travel while others compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.lower.autograd import call_function
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.communication.tensor_in_flight import TensorInFlight
from autopar.placement import Axis


class _Computed(torch.autograd.Function):
    """``2 * x``, which says when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("computes")
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.events.append("computes gradient")
        return 2 * gradients[0], None


class _Noted(TensorInFlight):
    events: list[str]
    what = ""  # then the gradient

    def leave(self, x: Tensor) -> None:
        self.events.append(f"{self.what}leaves")
        super().leave(x)

    def arrive(self) -> Tensor:
        self.events.append(f"{self.what}arrives")
        self.what = "gradient "
        return super().arrive()


def test_others_compute_while_it_travels_and_while_its_gradient_does():
    events: dict[int, list[str]] = {rank: [] for rank in range(2)}

    def run(communicator: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        class Own(_Noted):
            pass

        Own.events = events[communicator.rank]
        x = (10.0 * communicator.rank + torch.arange(4.0)).view(4, 1).requires_grad_()
        y = torch.ones(4, 1, requires_grad=True)
        flight = Own.exchanged(communicator, 3 * x, Axis(2, 1))
        other = call_function(_Computed, y, Own.events)
        arrived = flight.wait()
        (arrived * (1 + communicator.rank) + other).sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        return arrived.detach(), x.grad, y.grad

    for rank, (arrived, for_x, for_y) in enumerate(simulate(2, run)):
        own = torch.tensor([0.0, 1.0]) + 2 * rank
        assert arrived.flatten().tolist() == torch.cat([3 * own, 3 * (own + 10)]).tolist()
        assert for_x.flatten().tolist() == [3.0, 3.0, 6.0, 6.0]
        assert for_y.flatten().tolist() == [2.0] * 4
        assert events[rank] == [
            "leaves", "computes", "arrives", "gradient leaves", "computes gradient", "gradient arrives"
        ]  # fmt: skip
