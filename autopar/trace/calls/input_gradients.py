"""A model as what gives gradients of its calls' inputs, as ``create_graph=True`` outside of the model needs them.

The twin shares the model's parameters, buffers and submodules, under the same names, and leaves the model as it was.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.objects.gradient_requests import GRADIENTS, requests_of
from autopar.trace.calls.signature import bind
from autopar.trace.calls.structure import describe

__all__ = ["as_called", "giving_gradients"]

_GRADIENTS = inspect.Parameter(GRADIENTS, inspect.Parameter.KEYWORD_ONLY, default=None)


def as_called(model: nn.Module, kwargs: Mapping[str, Any]) -> nn.Module:
    """`model`, or what gives the gradients that a call with these keyword arguments asks for."""
    return giving_gradients(model) if GRADIENTS in kwargs else model


def giving_gradients(model: nn.Module) -> nn.Module:
    """A twin that is called as the model, with the keyword argument `GRADIENTS` in addition.

    It returns the gradients of inputs that this asks for, None for an input on which the outputs don't depend.
    """
    kind: Any = type(model)
    own = inspect.signature(model.forward)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        untyped: Any = super
        inherited: Any = untyped(twin_kind, self)
        called: Any = self.__dict__.get("replaced_forward", inherited.forward)
        return called(*args, **kwargs)

    members = {"forward": _with_signature(forward, own), "__module__": kind.__module__}
    members["__qualname__"] = kind.__qualname__
    twin_kind: Any = types.new_class(
        kind.__name__, (_GivingGradients, kind), exec_body=lambda body: body.update(members)
    )
    twin: Any = object.__new__(twin_kind)
    twin.__dict__ = dict(vars(model))
    if "forward" in twin.__dict__:
        twin.__dict__["replaced_forward"] = twin.__dict__.pop("forward")
    return twin


class _GivingGradients(nn.Module):
    """What the class of a twin has in addition to the model's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        requests = requests_of(kwargs)
        if not requests:
            kwargs.pop(GRADIENTS, None)
            return super().__call__(*args, **kwargs)
        last, asked = requests[-1], kwargs.pop(GRADIENTS)[:-1]
        inner = {**kwargs, GRADIENTS: asked} if asked else kwargs
        tensors = describe(bind(self, args, inner))[1]
        wanted = [tensors[place].requires_grad_() for place in last.inputs]
        with _StatisticsLeft():
            outputs = describe(self(*args, **inner))[1]
        if max(last.incoming) >= len(outputs):
            raise TraceError(
                "a loss is computed from an attribute that forward sets, whose gradients have none themselves: return "
                "it from forward"
            )
        ends = [outputs[place] for place in last.incoming]
        return torch.autograd.grad(ends, wanted, list(last.incoming.values()), create_graph=True, allow_unused=True)


class _StatisticsLeft(TorchFunctionMode):
    """Inside, norms that compute with the statistics of the batch don't update their running ones: the call whose
    gradients these are has done so.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What torch calls."""
        kwargs = kwargs or {}
        if func not in _OF_BATCHES:
            return func(*args, **kwargs)
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments[_OF_BATCHES[func]]:
            bound.arguments |= {"running_mean": None, "running_var": None}
        return func(*bound.args, **bound.kwargs)


_OF_BATCHES: dict[Any, str] = {functional.batch_norm: "training", functional.instance_norm: "use_input_stats"}
"""Functions of norms, and the arguments that say whether they compute with statistics of the batch."""


def _with_signature(forward: Callable[..., Any], own: inspect.Signature) -> Callable[..., Any]:
    given = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *own.parameters.values()]
    place = next((i for i, p in enumerate(given) if p.kind is inspect.Parameter.VAR_KEYWORD), len(given))
    given.insert(place, _GRADIENTS)
    forward.__signature__ = inspect.Signature(given)  # pyright: ignore[reportFunctionMemberAccess]  (inspect reads it)
    return forward
