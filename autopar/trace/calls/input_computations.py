"""What follows from inputs or buffers alone, as data: ops of a trace that later calls run again on their own tensors.

No ops at all are a computation, too: of an input itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from autopar.trace.compat import torch_internals
from autopar.trace.tensor_values import TensorValues, values_of

__all__ = ["Computation", "ComputedOp", "Operand", "function_name", "map_arguments"]

_MODULES = {"operator": operator, "math": math, "torch": torch}
"""Whose functions a trace records where Python computes with numbers of tensors."""


class Operand(NamedTuple):
    """Stands in arguments for one of the inputs, or, behind these, for what a step gives."""

    number: int


@dataclass(frozen=True)
class ComputedOp:
    """An op on inputs, constants and the results of other steps.

    Args:
        target: its name, such as ``aten.eq.Scalar``, or that of a function, such as ``operator.lt``.
        args: its positional arguments, with an `Operand` or a `TensorValues` in place of each tensor.
        kwargs: the others, likewise.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Computation:
    """Ops on some of the tensors of a call, in order; the result is that of the last, or the first input without ops.

    Args:
        places: of its inputs among the tensors of the call.
        steps: the ops.
    """

    places: tuple[int, ...]
    steps: tuple[ComputedOp, ...] = ()

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The result for a call with these `tensors`, on their device; None where the values of one are not known."""
        inputs = [tensors[place] for place in self.places]
        if any(x.is_meta or torch_internals.is_fake(x) for x in inputs):
            return None
        if not self.steps:
            return inputs[0]
        device = inputs[0].device if inputs else torch.device("cpu")
        results: list[Any] = [x.detach().to(device) for x in inputs]

        def given(x: Any) -> Any:
            if isinstance(x, torch.device):  # the trace's own
                return device
            return (
                x.tensor(device) if isinstance(x, TensorValues) else results[x.number] if isinstance(x, Operand) else x
            )

        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for step in self.steps:
                named = {name: map_arguments(x, given) for name, x in step.kwargs}
                results.append(_operation(step.target)(*map_arguments(step.args, given), **named))
        last = results[-1]
        return last if isinstance(last, Tensor) else torch.tensor(last)

    def known(self, tensors: Sequence[Tensor]) -> TensorValues | None:
        """The result as plain data; None where it is not known."""
        result = self(tensors)
        return None if result is None else values_of(result)


def function_name(function: Any) -> str | None:
    """Under which name a step calls a function of Python numbers; None if it is none of those that a trace records."""
    name = getattr(function, "__name__", "")
    named = (f"{path}.{name}" for path, module in _MODULES.items() if getattr(module, name, None) is function)
    return next(named, None)


def _operation(target: str) -> Callable[..., Any]:
    path, _, name = target.partition(".")
    if path in _MODULES:
        return getattr(_MODULES[path], name)
    op = torch_internals.overload(target)
    assert op is not None
    return op


def map_arguments(x: Any, change: Callable[[Any], Any]) -> Any:
    """`x` with `change` of each end of its lists and tuples, which all become tuples."""
    if isinstance(x, Operand | TensorValues) or not isinstance(x, list | tuple):
        return change(x)
    return tuple(map_arguments(part, change) for part in cast("Sequence[Any]", x))
