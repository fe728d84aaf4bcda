"""What a call asks for whose outputs are gradients: of which inputs of another call, given those of its outputs.

It is a keyword argument that forward doesn't see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["GRADIENTS", "GradientRequest", "requests_of", "with_request"]

GRADIENTS = "output_gradients"
_OF, _INPUTS = "of", "inputs"


class GradientRequest(NamedTuple):
    """One of several, each of the gradients that the one before gives.

    Args:
        incoming: gradients of outputs, by their places among the tensors that the call returns.
        inputs: the places, among the tensors of the call, of those whose gradients are asked for.
    """

    incoming: Mapping[int, Tensor]
    inputs: Sequence[int]


def with_request(kwargs: Mapping[str, Any], request: GradientRequest) -> dict[str, Any]:
    """The keyword arguments of the call for these gradients."""
    given = {str(place): gradient for place, gradient in sorted(request.incoming.items())}
    return {**kwargs, GRADIENTS: (*kwargs.get(GRADIENTS, ()), {_OF: given, _INPUTS: tuple(request.inputs)})}


def requests_of(kwargs: Mapping[str, Any]) -> list[GradientRequest]:
    """What a call with these keyword arguments asks for, in order; mostly nothing."""
    return [
        GradientRequest({int(place): gradient for place, gradient in each[_OF].items()}, each[_INPUTS])
        for each in kwargs.get(GRADIENTS, ())
    ]
