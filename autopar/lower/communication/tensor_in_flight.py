"""A tensor that travels between devices while others compute, and so does its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.communicator import Communicator
from autopar.placement import Axis

__all__ = ["TensorInFlight"]


class TensorInFlight:
    """An all-to-all under way.

    Backward runs what was called last first, so the gradient leaves where the tensor was waited for, and is waited
    for where the tensor left: what was computed in between forward is computed in between backward, too.
    """

    def __init__(self, communicator: Communicator, axis: Axis) -> None:
        self._communicator = communicator
        self._axis = axis
        self._link: Tensor | None = None
        self._handle: Handle | None = None

    @classmethod
    def exchanged(cls, communicator: Communicator, x: Tensor, axis: Axis) -> TensorInFlight:
        """Start to exchange ``[devices * n, ...]``: the n rows for each device of `axis` go there."""
        flight = cls(communicator, axis)
        if x.requires_grad:
            flight._link = call_function(_Leave, x, flight)
        else:
            flight.leave(x)
        return flight

    def wait(self) -> Tensor:
        """``[devices * n, ...]``, the rows from each device; call it once."""
        link, self._link = self._link, None
        return self.arrive() if link is None else call_function(_Arrive, link, self)

    def leave(self, x: Tensor) -> None:
        """Start with `x`: the tensor, or the gradient of what arrived."""
        shape, cut = x.shape, x.view(self._axis.size, -1, *x.shape[1:])
        exchange = self._communicator.start_all_to_all(cut, self._axis, 0, 0)
        self._handle = exchange.then(lambda got: got.reshape(shape))

    def arrive(self) -> Tensor:
        """What arrives, as often as something left: the tensor, or the gradient of what left."""
        handle, self._handle = self._handle, None
        assert handle is not None
        return handle.wait()


class _Leave(torch.autograd.Function):
    """Of a tensor without elements, which stands for the one in flight: only its place in the graph matters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: TensorInFlight) -> Tensor:
        ctx.flight = flight
        flight.leave(x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.flight.arrive(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, flight: TensorInFlight) -> Tensor:
        ctx.flight = flight
        return flight.arrive()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None]:
        (gradient,) = gradients
        ctx.flight.leave(gradient.contiguous())
        return gradient.new_empty(0), None
