"""The tensors of a call, by the names of the arguments that hold them, to be exchanged for others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.errors import InputShapeError
from autopar.trace.calls.structure import Leaf, Structure, describe, rebuild, walk

__all__ = ["CallTensors", "call_opener"]


@dataclass(frozen=True)
class CallTensors:
    """A call taken apart.

    Args:
        named: its tensors, by the path to each, such as ``"batch.input_ids"``, in the order of the signature.
        signature: of what is called.
        structure: of its arguments.
    """

    named: Mapping[str, Tensor]
    signature: inspect.Signature
    structure: Structure

    def call_with(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args, kwargs`` with these in place of those of `named`."""
        bound = inspect.BoundArguments(self.signature, rebuild(self.structure, tensors))
        return bound.args, bound.kwargs


def call_opener(model: nn.Module) -> Callable[[Sequence[Any], Mapping[str, Any]], CallTensors]:
    """The function that takes calls of `model` apart; it keeps the signature only.

    It raises InputShapeError for arguments that don't fit it.
    """
    signature = inspect.signature(model.forward)

    def open_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallTensors:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputShapeError(f"the call does not fit the model's forward{signature}: {error}") from error
        structure, tensors = describe(bound.arguments, opaque_is_constant=True)
        paths = [".".join(end.path) for end in walk(structure) if isinstance(end, Leaf)]
        return CallTensors(dict(zip(paths, tensors, strict=True)), signature, structure)

    return open_call
