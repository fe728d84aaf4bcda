"""Gradients of a call's inputs that have gradients themselves: ``create_graph=True`` outside of the model.

A step is a node of the caller's graph whose backward can't be differentiated.  So such a backward does not come to it:
the gradients are outputs of another call, whose program is forward and backward pass of the model, with a backward of
its own (`autopar.objects.gradient_requests`).  It is traced and planned when it first comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.autograd import call_untraced
from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.compat import will_run
from autopar.lower.run.carried_tensor import CarriedTensor

__all__ = ["Differentiate", "twice_differentiable"]

Differentiate = Callable[[Mapping[int, Tensor], Sequence[int]], Sequence[Tensor | None]]
"""``(incoming, wanted)`` -> gradients, with a graph, of the inputs at the places `wanted`, where those of outputs are
`incoming`, by place."""


def twice_differentiable(
    outputs: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    differentiate: Differentiate,
    refuse: Callable[[], Exception],
) -> list[Tensor | None]:
    """`outputs`, of which a backward with ``create_graph=True`` gives gradients by `differentiate`.

    Args:
        outputs: of a call.
        inputs: its tensors.
        parameters: those that it trains; if such a backward wants their gradients, it raises what `refuse` gives.
        differentiate: see there.
        refuse: see `parameters`.
    """
    state = _Incoming(inputs, differentiate, refuse)
    anchors = [inputs[place].view_as(inputs[place]) for place in state.places]
    trained = call_untraced(_Together, *parameters) if parameters else torch.zeros((), device="cpu")
    token = call_untraced(_Token, state, trained, *anchors)

    def give(place: int, x: Tensor) -> Tensor:
        return call_untraced(_Output, x, place, state, token)

    made = list(outputs)
    for place, x in enumerate(outputs):
        if x is None or not x.requires_grad or isinstance(x, DTensor | CarriedTensor):
            continue
        made[place] = x.followed_by(partial(give, place)) if isinstance(x, LateTensor) else give(place, x)
    return made


class _Incoming:
    """What a backward with ``create_graph=True`` brings.

    Attributes:
        places: of the inputs that want gradients.
    """

    def __init__(self, inputs: Sequence[Tensor], differentiate: Differentiate, refuse: Callable[[], Exception]) -> None:
        self.places = [place for place, x in enumerate(inputs) if x.requires_grad]
        self._gradients: dict[int, Tensor] = {}
        self._differentiate = differentiate
        self._refuse = refuse

    def add(self, place: int, gradient: Tensor) -> None:
        """One output's."""
        self._gradients[place] = self._gradients[place] + gradient if place in self._gradients else gradient

    def gradients(self, is_for_parameters: bool, is_wanted: Sequence[bool]) -> list[Tensor | None]:
        """Those of the inputs at `places`, None for those that are not wanted.

        Raises:
            AutoparError: those of parameters are wanted, or there is no such program.
        """
        incoming, self._gradients = self._gradients, {}
        if is_for_parameters:
            raise self._refuse()
        wanted = [place for place, is_one in zip(self.places, is_wanted, strict=True) if is_one]
        made = dict(zip(wanted, self._differentiate(incoming, wanted), strict=True))
        return [made.get(place) for place in self.places]


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int, state: _Incoming, token: Tensor) -> Tensor:
        ctx.place, ctx.state = place, state
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        (gradient,) = gradients
        if gradient is None or not torch.is_grad_enabled():
            return gradient, None, None, None
        ctx.state.add(ctx.place, gradient)
        return None, None, None, torch.zeros((), device="cpu")


class _Token(torch.autograd.Function):
    """Runs when all outputs have brought their gradients."""

    @staticmethod
    def forward(ctx: Any, state: _Incoming, parameters: Tensor, *inputs: Tensor) -> Tensor:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Any, ...]:
        is_wanted = [will_run(node) for node, _ in ctx.next_functions]
        if gradients[0] is None:
            return None, None, *(None for _ in is_wanted[1:])
        return None, None, *ctx.state.gradients(is_wanted[0], is_wanted[1:])


class _Together(torch.autograd.Function):
    """One node for all parameters, which runs if a gradient of any of them is wanted."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        ctx.set_materialize_grads(False)
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (None,) * ctx.count
