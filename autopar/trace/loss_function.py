"""A loss that is computed outside of the model, put inside: a twin of the model that takes the target as well.

The twin shares the model's parameters, buffers and submodules, under the same names, and leaves the model as it was.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, ExampleInputsError, LossError
from autopar.objects.compiled_modules import uncompiled
from autopar.trace.calls.loss_output import without_loss
from autopar.trace.calls.signature import as_batch, bind, check_model, default_example_inputs, signature_text
from autopar.trace.compat import torch_internals
from autopar.trace.tracing import Traced
from autopar.user_text.suggestions import kind_of

__all__ = ["LossFunction", "put_loss_inside", "require_target", "without_target"]

LossFunction = Callable[..., Tensor]

_TARGET = "target"  # the keyword argument that the twin has in addition to the model's own
_NO_TARGET = (
    "the target is missing, which loss_fn needs in training: call loss = model(*inputs, target=target). "
    "After model.eval(), or under torch.no_grad(), a call without target gives the model's outputs"
)
_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


def put_loss_inside(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any] | None,
    loss_fn: LossFunction | None,
    example_target: Any,
) -> tuple[nn.Module, Sequence[Any] | Mapping[str, Any] | None]:
    """The model and example inputs to work with: with `loss_fn`, a twin that takes the target and returns the loss.

    Of a model that ``torch.compile`` wraps it is the one inside: a plan says whether its layers are compiled.

    ``twin(*inputs, target=target)`` is ``loss_fn(model(*inputs), target)``, where a tuple or list of targets becomes
    several positional arguments and a dict keyword arguments; ``twin(*inputs)`` is ``model(*inputs)``.

    Raises:
        LossError: `loss_fn` can't be used with this model.
        ModelError: the model is no module, or parallel already.
        ExampleInputsError: there is only one of `loss_fn` and `example_target`, or the example inputs are of no form.
    """
    model = uncompiled(model)
    check_model(model)
    example_inputs = as_batch(example_inputs)
    if loss_fn is None:
        if example_target is not None:
            raise ExampleInputsError("example_target= is the target of loss_fn, which is missing: pass both or neither")
        return model, example_inputs
    if example_target is None:
        raise ExampleInputsError(
            "loss_fn= needs a target to be traced with: pass example_target=, what loss_fn gets after the model's "
            "outputs (a tensor; a tuple for several, a dict for keyword arguments)"
        )
    inputs = default_example_inputs(model) if example_inputs is None else example_inputs
    signature = _named_signature(model, inputs)
    named = dict(inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs).arguments
    return _make_twin(model, loss_fn, signature), {**named, _TARGET: example_target}


def require_target(model: nn.Module, traced: Traced, *, is_given: bool = True) -> Traced:
    """`traced`, but if `model` is a twin with a loss function, with an error for calls with gradients that lack the
    target.

    Without gradients, as in ``torch.optim.swa_utils.update_bn``, such calls have a program of their own, which gives
    the model's outputs.

    Raises:
        LossError: the call that was traced lacks it (`is_given` is False) and wants gradients, or the loss that the
            twin computes depends on no parameter.
    """
    if not isinstance(model, _WithLoss):
        return traced
    if not is_given:
        _refuse_gradients()
        traced = replace(traced, program=without_loss(traced.program))
    elif not traced.program.loss:
        raise LossError(
            "the loss that loss_fn returns depends on no parameter that trains: compute it from the model's outputs, "
            "without detach() or torch.no_grad()"
        )

    def flatten_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        if kwargs.get(_TARGET) is None:
            _refuse_gradients()
        return traced.flatten_inputs(args, kwargs)

    return replace(traced, flatten_inputs=flatten_inputs)


def _refuse_gradients() -> None:
    if torch.is_grad_enabled():
        raise LossError(_NO_TARGET)


def without_target(
    model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """The example inputs with which a twin with a loss function gives the model's outputs; None for other models."""
    if not isinstance(model, _WithLoss) or not isinstance(example_inputs, Mapping):
        return None
    return {name: value for name, value in example_inputs.items() if name != _TARGET}


class _WithLoss(nn.Module):
    """What the class of a twin has in addition to the model's own."""

    loss_fn: LossFunction
    own_class: type[nn.Module]
    own_forward: Callable[..., Any] | None = None  # of a model whose forward was replaced on the instance

    def __call__(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        outputs: Any = super().__call__(*args, **kwargs)  # with the model's hooks, which see its outputs
        return outputs if target is None else _loss_of(type(self).loss_fn, outputs, target)


def _make_twin(model: nn.Module, loss_fn: LossFunction, signature: inspect.Signature) -> nn.Module:
    if isinstance(loss_fn, nn.Module) and (own := [name for name, p in loss_fn.named_parameters() if p.requires_grad]):
        raise LossError(
            f"loss_fn has parameters of its own ({', '.join(own[:3])}), which would not be trained: make it a part of "
            "the model, and let the model return the loss"
        )
    kind: Any = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)  # names that only the signature has become places again
        own = kind.forward.__get__(self) if self.own_forward is None else self.own_forward
        return own(*bound.args, **bound.kwargs)

    members = {
        "forward": _with_signature(forward, _with_target(signature)),
        "loss_fn": staticmethod(loss_fn),
        "own_class": kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    twin_kind: Any = types.new_class(kind.__name__, (_WithLoss, kind), exec_body=lambda body: body.update(members))
    twin: Any = object.__new__(twin_kind)
    twin.__dict__ = dict(vars(model))
    if "forward" in twin.__dict__:
        twin.__dict__["own_forward"] = twin.__dict__.pop("forward")
    return twin


def _named_signature(model: nn.Module, inputs: Sequence[Any] | Mapping[str, Any]) -> inspect.Signature:
    """That of the model's forward, where each of the positional `inputs` has a name."""
    signature = inspect.signature(model.forward)
    if _TARGET in signature.parameters:
        raise LossError(
            f"the model takes an argument {_TARGET!r} already ({signature_text(model)}), as loss_fn's "
            "target is called: rename it, or let the model compute the loss"
        )
    if isinstance(inputs, Mapping):
        return signature
    given = bind(model, inputs, {})
    named: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            if name in given:
                named = [each.replace(default=inspect.Parameter.empty) for each in named]  # all are given
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            named += [inspect.Parameter(f"{name}_{place}", kind) for place in range(len(given.get(name, ())))]
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            named.append(parameter.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD))
        else:
            named.append(parameter)
    return signature.replace(parameters=named)


def _with_target(signature: inspect.Signature) -> inspect.Signature:
    """That of the class's forward, with the target: it is what calls are bound to."""
    own = list(signature.parameters.values())
    place = next((i for i, p in enumerate(own) if p.kind is inspect.Parameter.VAR_KEYWORD), len(own))
    own.insert(place, inspect.Parameter(_TARGET, inspect.Parameter.KEYWORD_ONLY, default=None))
    return inspect.Signature([_SELF, *own])


def _with_signature(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]  (what inspect looks for)
    return function


def _loss_of(loss_fn: LossFunction, outputs: Any, target: Any) -> Tensor:
    try:
        loss: Any = _call(loss_fn, outputs, target)
    except (AutoparError, *torch_internals.DATA_DEPENDENT):
        raise
    except Exception as error:
        raise LossError(
            f"loss_fn fails on the model's outputs (a {type(outputs).__name__}) and the target: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(loss, Tensor) or loss.dim():
        result = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
        raise LossError(f"loss_fn returns {result}, but training needs one number: return its mean() or sum()")
    return loss


def _call(loss_fn: LossFunction, outputs: Any, target: Any) -> Any:
    if isinstance(target, Mapping):
        return loss_fn(outputs, **cast("Mapping[str, Any]", target))
    if isinstance(target, tuple | list):
        return loss_fn(outputs, *cast("Sequence[Any]", target))
    return loss_fn(outputs, target)
