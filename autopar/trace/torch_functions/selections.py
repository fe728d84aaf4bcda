"""``x[mask]`` with a boolean tensor, where it ends in a sum or a mean: whole tensors, with the mask as weights.

How much a mask selects depends on values, so that no graph of fixed shapes has it.  A `Selected` stands for it while a
model is traced: it goes through ops that work element by element, or row by row, as the whole tensor, and a reduction
over the selection becomes one over all, of zeros where nothing is selected.  Rows of another tensor, one for each
element that is selected, are put where the mask is (``x[mask] + rows``), and ``x[mask] = selected`` writes there.
Everything else is refused.

What is not selected is replaced by a harmless number before each op that has no finite value or slope somewhere, so
that it can't turn the gradients into NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.objects.tensor_versions import version_of
from autopar.trace.compat import torch_internals, torch_recording
from autopar.trace.compat.source_lines import user_line
from autopar.trace.python_values.asked_values import AskedValues
from autopar.trace.python_values.read_inputs import UnansweredError
from autopar.trace.torch_functions.feature_order import put_rows

__all__ = ["Mask", "Selected", "Selections", "refuse_output", "refuse_size"]

_HARMLESS = 0.5  # in the domain, and away from the corners, of every op in `_BY_ELEMENT`
_FINITE = frozenset({
    "add", "sub", "rsub", "mul", "neg", "square", "to", "float", "double", "half", "bfloat16", "clone", "detach",
    "contiguous", "relu", "tanh", "sigmoid", "abs", "clamp", "linear", "dropout", "radd", "rmul", "subtract",
    "multiply", "negative", "silu", "gelu", "elu", "leaky_relu", "softplus", "logsigmoid", "sin", "cos", "erf",
})  # fmt: skip
"""Ops that are finite, and have finite slopes, wherever their operands are finite."""
_BY_ELEMENT = _FINITE | {
    "log", "log2", "log10", "log1p", "exp", "expm1", "sqrt", "rsqrt", "reciprocal", "pow", "div", "truediv", "rtruediv",
    "rdiv", "divide", "true_divide", "sign", "clamp_min", "clamp_max", "minimum", "maximum", "eq", "ne", "lt", "le",
    "gt", "ge", "logical_not",
}  # fmt: skip
_BY_ROW = frozenset({"linear", "layer_norm", "rms_norm", "softmax", "log_softmax", "logsumexp", "normalize", "norm"})
"""Those that read the last dim only, unless `dim` says another."""
_LOSSES = frozenset({
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div",
})  # fmt: skip


@dataclass(frozen=True)
class Mask:
    """What selects: a copy as it was, the tensor and its version to tell masks apart, and the user's line."""

    copy: Tensor
    tensor: Tensor
    version: int | None
    where: str

    def is_same(self, other: Mask) -> bool:
        """Whether both select the same for sure."""
        if self.tensor is other.tensor:
            return self.version == other.version
        return torch_recording.is_same_computation(self.tensor, other.tensor)


class Selected:
    """What a mask selects of `values`, [selected, *rest] where these are [*mask, *rest]; dims of the mask may be 1."""

    def __init__(self, values: Tensor, mask: Mask) -> None:
        """`values` are finite where nothing is selected if they were harmless there."""
        self.values, self.mask = values, mask

    @property
    def num_rest(self) -> int:
        """How many dims each selected element has."""
        return self.values.dim() - self.mask.copy.dim()

    @property
    def whole(self) -> Tensor:
        """The values with all dims of the mask."""
        return self.values.expand(*self.mask.copy.shape, *self.values.shape[self.mask.copy.dim() :])

    def harmless(self) -> Selected:
        """The same, with a harmless number where nothing is selected."""
        return Selected(self.replaced(_HARMLESS if self.values.is_floating_point() else 0), self.mask)

    def replaced(self, number: float) -> Tensor:
        """The values, with `number` where nothing is selected."""
        chosen = self.mask.copy.reshape(*self.mask.copy.shape, *[1] * self.num_rest)
        return torch.where(chosen, self.values, torch.full((), number, dtype=self.values.dtype))

    def reduced(self, how: str, *, dim: int | None = None) -> Tensor:
        """Their sum or mean, over everything or (dim 0) over the selection."""
        values = self if self.values.is_floating_point() else Selected(self.values.to(torch.int64), self.mask)
        zeros = values.replaced(0)
        total = zeros.sum() if dim is None else zeros.sum(tuple(range(self.mask.copy.dim())))
        if how == "sum":
            return total
        rest = math.prod(self.values.shape[self.mask.copy.dim() :]) if dim is None else 1
        return total / (self.mask.copy.sum().to(total.dtype) * rest)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func` of what is selected.

        Raises:
            TraceError: it needs more than the mask as weights.
        """
        return _call(func, tuple(args), dict(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        """Attributes and methods of tensors."""
        if name in ("dtype", "device", "is_floating_point", "requires_grad"):
            return getattr(self.values, name)
        method: Any = getattr(Tensor, name, None)
        if method is None:
            raise AttributeError(name)
        return partial(_call_method, method, self) if callable(method) else refuse_size(name, masks=[self.mask])


def _call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _call(method, args, kwargs)


def _operator(name: str) -> Callable[..., Any]:
    return lambda *args: _call(getattr(Tensor, name), args, {})


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "abs", "eq", "ne",
              "lt", "le", "gt", "ge", "len", "getitem", "bool", "iter"):  # fmt: skip
    setattr(Selected, f"__{_name}__", _operator(f"__{_name}__"))


class Selections(TorchFunctionMode):
    """In this context, what a boolean mask selects is a `Selected`.

    A mode, as ``Tensor.__getitem__`` must not be replaced: Python then takes tensors for sequences for ever, so that
    ``torch.tensor([loss])`` fails after it was put back.
    """

    def __init__(self, questions: AskedValues) -> None:
        """Where a mask selects, if `questions` answer that, is known, and it selects a tensor of that many rows."""
        super().__init__()
        self._questions = questions

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        given = kwargs or {}
        if func is Tensor.__setitem__ and _write(*args):
            return None
        if func is Tensor.__getitem__:
            selected = _select(self._questions, *args)
        elif func in (Tensor.masked_select, torch.masked_select):
            selected = _select_masked(self._questions, *args, **given)
        else:
            selected = None
        return func(*args, **given) if selected is None else selected


def _select_masked(questions: AskedValues, input: Tensor, mask: Tensor, **kwargs: Any) -> Selected | Tensor | None:
    broadcast: Any = cast("Any", torch).broadcast_shapes
    shape = broadcast(input.shape, mask.shape)
    return None if kwargs else _select(questions, input.expand(shape), mask.expand(shape))


def _select(questions: AskedValues, x: Any, index: Any) -> Selected | Tensor | None:
    """``x[index]`` if that is a selection by a boolean tensor, else None."""
    mask = _mask_of(x, index)
    if mask is None:
        return _select_behind(questions, x, index)
    if torch_internals.has_known_values(mask):
        return x[mask.nonzero().unbind(1)]
    # What of results a mask selects, as in a loss, is other in every batch; which inputs there are is asked here.
    is_asked = questions.computation_of(x) or questions.is_constant(mask) or questions.follows_from_buffers(mask)
    places = questions.answer(mask, are_places=True) if is_asked else None
    if places is not None:
        rest = x.shape[mask.dim() :]
        return x.reshape(-1, *rest).clone() if len(places) == mask.numel() else x[places.unbind(1)]
    return Selected(x, Mask(mask.clone(), mask, version_of(mask), user_line())).harmless()


def _select_behind(questions: AskedValues, x: Any, index: Any) -> Tensor | None:
    """``x[..., mask]`` with a mask of constants, such as one of what is off a diagonal, or of buffers, else None."""
    indices: tuple[Any, ...] = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else ()
    masks = [at for at, each in enumerate(indices) if isinstance(each, Tensor) and each.dtype == torch.bool]
    if len(masks) != 1 or not isinstance(x, Tensor):
        return None
    mask = cast("Tensor", indices[masks[0]])
    if not questions.is_constant(mask) and not questions.follows_from_buffers(mask):
        return None
    places = questions.answer(mask, are_places=True, is_size=True)
    return None if places is None else x[*indices[: masks[0]], *places.unbind(1), *indices[masks[0] + 1 :]]


def _write(x: Any, index: Any, value: Any) -> bool:
    """``x[index] = value``, if `value` is what a mask selects; whether it is.

    Raises:
        TraceError: `index` is not for sure the mask that selected `value`, or `x` has other dims behind it.
    """
    if not isinstance(value, Selected):
        return False
    mask = _mask_of(x, index)
    if mask is None or not value.mask.is_same(Mask(mask, mask, version_of(mask), user_line())):
        refuse_size("__setitem__", "of what another mask selects (use one mask tensor for both)", [value.mask])
    rest = x.shape[mask.dim() :]
    if value.num_rest > len(rest):
        refuse_size("__setitem__", "of fewer dims", [value.mask])
    aligned = value.whole.reshape(*mask.shape, *[1] * (len(rest) - value.num_rest), *value.values.shape[mask.dim() :])
    chosen = mask.reshape(*mask.shape, *[1] * len(rest))
    x.copy_(torch.where(chosen, aligned.to(x.dtype), x))
    return True


def _mask_of(x: Any, index: Any) -> Tensor | None:
    """The boolean tensor that selects in ``x[index]``, along the first dims of `x` and of all that is behind them."""
    indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    mask = indices[0] if indices else None
    if not isinstance(x, Tensor) or not isinstance(mask, Tensor) or mask.dtype != torch.bool or not mask.dim():
        return None
    if tuple(x.shape[: mask.dim()]) != tuple(mask.shape) or len(indices) > 1 + x.dim() - mask.dim():
        return None
    return mask if all(each in (..., slice(None)) for each in indices[1:]) else None


def refuse_output(returned: Any) -> None:
    """Raise TraceError if what a model returns consists of what a mask selects."""
    leaves, _ = torch_internals.flatten(returned)
    selected = next((x for x in leaves if isinstance(x, Selected)), None)
    if selected is not None:
        raise TraceError(
            f"{selected.mask.where}: the model returns what a boolean mask selects, whose size depends on values; "
            "return the whole tensor and the mask, or torch.where(mask, x, 0)"
        )


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    plain = name.strip("_")
    chosen = [x for x in (*args, *kwargs.values()) if isinstance(x, Selected)]
    if not chosen or any(not x.mask.is_same(chosen[0].mask) for x in chosen):
        refuse_size(
            name, "together with what another mask selects (use one mask tensor for both)", [x.mask for x in chosen]
        )
    first = chosen[0]
    if plain in ("sum", "mean") and args[0] is first:
        return _reduce(first, plain, *args[1:], **kwargs)
    if plain == "cross_entropy":
        return _cross_entropy(*args, **kwargs)
    if plain in _LOSSES:
        args, kwargs = _with_rows(first, args, kwargs)
        how = kwargs.pop("reduction", "mean")
        terms = _apply(func, args, {**kwargs, "reduction": "none"}, is_finite=False)
        return (
            terms
            if how == "none"
            else _reduce(terms, how)
            if how in ("mean", "sum")
            else refuse_size(name, masks=[first.mask])
        )
    if plain in _BY_ROW and all(
        _is_of_rest(dim, first) for dim in (kwargs.get("dim", -1), *args[1:2]) if type(dim) is int
    ):
        return _apply(func, args, kwargs, is_finite=plain in _FINITE)
    if plain == "unsqueeze" and args[0] is first and (*args[1:], *kwargs.values()) == (-1,):
        return Selected(first.values.unsqueeze(-1), first.mask)
    if plain == "chunk" and args[0] is first and (*args[2:], *kwargs.values()) == (-1,) and first.num_rest:
        return tuple(Selected(part, first.mask) for part in first.values.chunk(args[1], -1))
    if plain in _BY_ELEMENT:
        args, kwargs = _with_rows(first, args, kwargs)
    rest = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > first.num_rest]
    if plain not in _BY_ELEMENT or rest or (name.endswith("_") and not name.startswith("_")):
        refuse_size(name, masks=[first.mask])
    return _apply(func, args, kwargs, is_finite=plain in _FINITE)


def _with_rows(
    first: Selected, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with tensors [selected, *rest] put where the mask of `first` is: in its order, row by row."""

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() != 1 + first.num_rest:
            return x
        if x.shape[0] == 1:  # which broadcasts to all, of which there may be one
            return x[0]
        shape = (*first.mask.copy.shape, *x.shape[1:])
        chosen = first.mask.copy.reshape(*first.mask.copy.shape, *[1] * first.num_rest).expand(shape)
        return Selected(put_rows(torch.zeros(shape, dtype=x.dtype), chosen, x), first.mask)

    return tuple(map(placed, args)), {name: placed(x) for name, x in kwargs.items()}


def _is_of_rest(dim: int, selected: Selected) -> bool:
    return -selected.num_rest <= dim < 0


def _apply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, is_finite: bool) -> Selected:
    mask = next(x.mask for x in (*args, *kwargs.values()) if isinstance(x, Selected))

    def whole(x: Any) -> Any:
        return (x if is_finite else x.harmless()).values if isinstance(x, Selected) else x

    return Selected(func(*map(whole, args), **{name: whole(x) for name, x in kwargs.items()}), mask)


def _reduce(selected: Selected, how: str, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if dim is None and not kwargs:
        return selected.reduced(how)
    if dim in (0, (0,), [0]) and not keepdim and not kwargs:
        return selected.reduced(how, dim=0)
    if isinstance(dim, int) and _is_of_rest(dim, selected):
        return Selected(getattr(selected.values, how)(dim, keepdim, **kwargs), selected.mask)
    return refuse_size(how, masks=[selected.mask])


def _cross_entropy(
    logits: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """That of all, with the target to ignore where nothing is selected."""
    if not isinstance(logits, Selected) or not isinstance(target, Selected) or args or size_average is not None:
        return refuse_size("cross_entropy", "unless logits and targets are selected by one mask")
    if logits.num_rest != 1 or target.num_rest or target.values.is_floating_point():
        return refuse_size("cross_entropy", "of more than rows of logits and class numbers")
    rows = logits.whole.reshape(-1, logits.values.shape[-1])
    classes = target.replaced(ignore_index).reshape(-1)
    result = functional.cross_entropy(rows, classes, weight, ignore_index=ignore_index, **kwargs)
    return Selected(result.view(target.whole.shape), target.mask) if kwargs.get("reduction") == "none" else result


def refuse_size(name: str, more: str = "of what a boolean mask selects", masks: Sequence[Mask] = ()) -> NoReturn:
    """Raise TraceError: `name` needs to know how much a mask selects."""
    raise UnansweredError(
        f"{user_line()}: {name} {more} needs a size that depends on values; what a mask selects can go through "
        "ops that work element by element or along its last dim, into a sum, a mean or a loss. Use fixed sizes and "
        "masks (torch.where) instead",
        [mask.where for mask in masks],
    )
