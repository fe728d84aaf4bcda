"""How much an optimizer keeps per element of a parameter, and which parameters it needs whole: known by name, or seen
in steps on small parameters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import ConstraintError
from autopar.lower.kernels.random import generators_kept
from autopar.lower.parameters.whole_matrices import works_on_slices
from autopar.user_text.suggestions import suggest

__all__ = ["state_bytes_per_element", "whole_states"]

# Tensors of the parameter's shape and dtype that the optimizer keeps per parameter, by class name in lower case.
_NUM_TENSORS = {
    "adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "sgd": 0, "momentum": 1, "adagrad": 1,
    "rmsprop": 1, "rprop": 2, "adadelta": 2, "asgd": 1, "lion": 1, "muon": 1, "lamb": 2,
}  # fmt: skip
# Those in 8 bits: a byte per element and a float32 per block of 256, for each moment.
_BYTES = {"adamw8bit": 2 * (1 + 4 / 256), "adam8bit": 2 * (1 + 4 / 256), "lion8bit": 1 + 4 / 256}
# Of those that need whole parameters, how many states of a vector's and of a matrix's shape they keep.
_WHOLE = {"muon": (-1, 1), "lamb": (2, 2)}
_SEEN = {"adafactor": torch.optim.Adafactor}  # names of what takes a look
_MOST_ELEMENTS = 1 << 18  # of a shape that is tried itself: a step then takes milliseconds
_SHAPES = ((4096,), (128, 128), (128, 384), (384, 384), (256, 384))
"""Of trial parameters: dims of 128 and more, which optimizers factor, and sizes that they quantize."""


def state_bytes_per_element(model: nn.Module, optimizer: Any) -> float:
    """Bytes of state per element of the parameters of `model` that train, on average.

    Args:
        model: what is trained.
        optimizer: a name, a class, or anything that makes an optimizer of a list of parameters.

    Raises:
        ConstraintError: the name is not known, or no optimizer can be made and step.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    dtype = max((p.dtype for p in trained), key=lambda dtype: dtype.itemsize, default=torch.float32)
    name = _name(optimizer)
    if name in _BYTES:
        return _BYTES[name]
    if name in _NUM_TENSORS:
        return float(dtype.itemsize * _NUM_TENSORS[name])
    optimizer = _SEEN.get(optimizer.lower(), optimizer) if isinstance(optimizer, str) else optimizer
    if isinstance(optimizer, str) or not callable(optimizer):
        known = (*_NUM_TENSORS, *_BYTES, *_SEEN)
        raise ConstraintError(
            f"optimizer={optimizer!r} is not known: use the name of one of {', '.join(known)}, any optimizer's class, "
            f"or a function that makes one of parameters{suggest(name, known)}"
        )
    return _average(trained, _measured(cast("Callable[..., Any]", optimizer), dtype))


def whole_states(optimizer: Any) -> tuple[int, int]:
    """How many states of a vector's and of a matrix's shape a step needs whole: `TrainingSpec.whole_states`.

    Args:
        optimizer: what `state_bytes_per_element` has taken.
    """
    name = _name(optimizer)
    if name in _NUM_TENSORS or name in _BYTES:
        return _WHOLE.get(name, (-1, -1))
    make = _SEEN[optimizer.lower()] if isinstance(optimizer, str) else optimizer
    return _whole_states(make, torch.ones(128)), _whole_states(make, torch.ones(128, 384))


def _whole_states(make: Callable[..., Any], values: Tensor) -> int:
    """Preconditioners and factors are not of the shape of `values`, which is no square."""
    try:
        with generators_kept(values.device):
            state = _stepped(make, values)
    except Exception:  # noqa: BLE001  (for matrices only, as Muon is)
        return -1
    if works_on_slices(partial(_made, make), values, range(values.dim())):
        return -1
    return sum(isinstance(x, Tensor) and x.shape == values.shape for x in state.values())


def _name(optimizer: Any) -> str:
    """The name by which an optimizer is known, in lower case; "" for what makes one."""
    if isinstance(optimizer, str):
        return optimizer.lower()
    name: str = getattr(optimizer, "__name__", "")
    return name.lower() if inspect.isclass(optimizer) or name.lower() in _BYTES else ""


def _average(trained: Sequence[Tensor], per_shape: Callable[[tuple[int, ...]], float]) -> float:
    total = sum(per_shape(tuple(p.shape)) for p in trained)
    return total / max(sum(p.numel() for p in trained), 1)


def _measured(optimizer: Callable[..., Any], dtype: torch.dtype) -> Callable[[tuple[int, ...]], float]:
    """Shape -> bytes of state: of large parameters so much per element, per row and column, and per square of these."""

    @cache
    def seen(shape: tuple[int, ...]) -> float:
        with generators_kept(torch.device("cpu")):
            return _state_bytes(optimizer, torch.ones(shape, dtype=dtype))

    terms = torch.tensor([_terms(shape) for shape in _SHAPES[1:]], dtype=torch.float64)
    linalg: Any = torch.linalg
    factors: list[float] = linalg.solve(terms, terms.new_tensor([seen(shape) for shape in _SHAPES[1:]])).tolist()

    def per_shape(shape: tuple[int, ...]) -> float:
        size = math.prod(shape)
        if size <= _MOST_ELEMENTS:
            return seen(shape)
        if len(shape) < 2:
            return seen(_SHAPES[0]) / math.prod(_SHAPES[0]) * size
        return max(0.0, sum(factor * term for factor, term in zip(factors, _terms(shape), strict=True)))

    return per_shape


def _terms(shape: tuple[int, ...]) -> tuple[float, ...]:
    rows, columns = shape[0], math.prod(shape[1:])
    return 1.0, rows * columns, rows + columns, rows**2 + columns**2


def _state_bytes(optimizer: Callable[..., Any], values: Tensor) -> float:
    try:
        state = _stepped(optimizer, values)
    except Exception as error:
        if values.dim() == 1:
            return 0.0  # for matrices only, as Muon is
        raise ConstraintError(
            f"optimizer={optimizer!r}: {type(error).__name__} in a step on one parameter of shape "
            f"{list(values.shape)}: {error}. Pass a function that makes it, such as "
            "lambda parameters: Lion(parameters, lr=1e-4), or the name of one with as much state, such as 'adamw'"
        ) from error
    return float(sum(x.numel() * x.element_size() for x in _plain_tensors(state.values())))


def _stepped(optimizer: Callable[..., Any], values: Tensor) -> dict[str, Any]:
    """What it keeps for one parameter after a step."""
    parameter = nn.Parameter(values)
    parameter.grad = torch.linspace(0.1, 1.0, values.numel()).view_as(values).to(values.dtype)
    made: Any = _made(optimizer, parameter)
    if callable(begin := getattr(made, "train", None)):
        begin()  # optimizers that evaluate with other parameters step in training mode only (schedulefree)
    made.step()
    return dict(made.state[parameter])


def _made(optimizer: Callable[..., Any], parameter: nn.Parameter) -> Any:
    try:
        return optimizer([parameter])
    except TypeError:
        return optimizer([parameter], lr=1e-3)


def _plain_tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Those in nested containers, and those that a quantized tensor consists of."""
    for value in values:
        if isinstance(value, Tensor):
            quantized: Any = getattr(value, "__tensor_flatten__", None)
            names: Sequence[str] = quantized()[0] if quantized else ()
            yield from _plain_tensors(getattr(value, name) for name in names) if names else (value,)
        elif isinstance(value, list | tuple):
            yield from _plain_tensors(cast("Sequence[Any]", value))
        elif isinstance(value, dict):
            yield from _plain_tensors(cast("dict[Any, Any]", value).values())
