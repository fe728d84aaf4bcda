"""Calls of the model: example arguments bound to its signature, so that later calls can be compared with them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import ExampleInputsError, InputShapeError, ModelError
from autopar.trace.calls.input_computations import Computation
from autopar.trace.calls.structure import Constant, Leaf, Structure, describe, holds_tensors, is_cache, rebuild, walk
from autopar.trace.tensor_values import TensorValues
from autopar.user_text.suggestions import kind_of

__all__ = [
    "MOST_READ",
    "CallForm",
    "ComputedValues",
    "ReadValues",
    "as_batch",
    "bind",
    "call_form",
    "can_be_read",
    "check_model",
    "computed_texts",
    "default_example_inputs",
    "signature_text",
]

# The sizes of 341 images.  Ids of tokens are mostly more, and differ in every batch, for each of which to plan anew
# would take longer than its step.
MOST_READ = 1024


def default_example_inputs(model: nn.Module) -> dict[str, Any]:
    """The example inputs that `model` itself declares as ``dummy_inputs`` (a mapping of keyword arguments).

    Raises:
        ExampleInputsError: it declares none; the message shows the call to make.
    """
    declared: Any = getattr(model, "dummy_inputs", None)
    if isinstance(declared, Mapping) and declared:
        return dict(cast("Mapping[str, Any]", declared))
    raise ExampleInputsError(
        f"{type(model).__name__} declares no dummy_inputs, so example inputs are needed: its forward takes "
        f"{signature_text(model)}. Pass one batch as the training loop does, for instance "
        "autopar.parallelize(model, mesh, example_inputs=dict(input=torch.zeros(8, 128)))"
    )


def as_batch(inputs: object) -> Sequence[Any] | Mapping[str, Any] | None:
    """Example inputs as the arguments of a call: a tensor alone is that of a model with one input.

    Raises:
        ExampleInputsError: they are none of what they may be.
    """
    if isinstance(inputs, Tensor):
        return (inputs,)
    if inputs is None or (isinstance(inputs, Mapping | Sequence) and not isinstance(inputs, str | bytes)):
        return cast("Sequence[Any] | Mapping[str, Any] | None", inputs)
    raise ExampleInputsError(
        f"example_inputs is {kind_of(inputs)}: pass one batch as the training loop does, a tensor, a tuple of "
        "positional arguments, such as (x, y), or a dict of keyword arguments, such as {'input_ids': ids}"
    )


def check_model(model: object) -> None:
    """Raise unless `model` is a module as one device trains it.

    Raises:
        ModelError: it is no module, or parallel already.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else kind_of(model)
        raise ModelError(f"model is {what}: pass an nn.Module, such as Model(config)")
    cut = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), "")
    if cut or isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        why = f", its parameter {cut!r} is a DTensor" if cut else ""
        raise ModelError(
            f"the model is parallel already: it is {kind_of(model)}{why}. Pass the model of one device that it "
            "was made from"
        )


def signature_text(model: nn.Module) -> str:
    """The signature of the model's forward, for people."""
    signature = inspect.signature(model.forward)
    return f"{type(model).__name__}.forward{signature}"


def bind(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by parameter name, in the signature's order, those left at their defaults omitted.

    Raises:
        ExampleInputsError: the arguments don't fit the signature.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ExampleInputsError(
            f"the inputs don't fit the model: {error}. It is called as {signature_text(model)}"
        ) from error
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given[name] = {key: value[key] for key in sorted(value)}
        elif not _is_default(value, parameter.default):
            given[name] = value
    return given


def _is_default(value: Any, default: Any) -> bool:
    if value is default:
        return True
    return isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default


def can_be_read(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether the values of such an input may become constants of a trace: few integers or truth values."""
    return not (dtype.is_floating_point or dtype.is_complex) and math.prod(shape) <= MOST_READ


@dataclass(frozen=True)
class ReadValues:
    """What forward reads in Python: an input, or what follows from inputs alone.

    Args:
        computation: what gives it in a call; without steps an input.
        known: what it gave in the call that was traced.
        where: the line that reads it.
    """

    computation: Computation
    known: TensorValues
    where: str

    @property
    def place(self) -> int:
        """The place of the input that is read as it is among the tensors; -1: something is computed first."""
        return -1 if self.computation.steps else self.computation.places[0]


class ComputedValues(NamedTuple):
    """What follows from `inputs` (by name) and is read at the line `where`: the shape and the values, in row-major
    order.
    """

    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    values: tuple[int, ...]
    where: str


def computed_texts(values: Sequence[ComputedValues]) -> tuple[tuple[str, str], ...]:
    """For each of `values`, what it is, and its value."""
    return tuple(
        (f"{_names_text(each.inputs)} ({each.where}, {number})", f"{list(each.values)} {each.shape}")
        for number, each in enumerate(values)
    )


@dataclass(frozen=True)
class CallForm:
    """What every call of a traced model must look like: the structure of its arguments, and each tensor's
    type.

    `cast` is the dtype that floating inputs are turned into (mixed precision), or None; `reads` is what of the
    values of inputs must be equal too.
    """

    model_signature: inspect.Signature
    signature_text: str
    structure: Structure
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]
    cast: torch.dtype | None
    reads: tuple[ReadValues, ...] = ()

    @property
    def read_values(self) -> dict[str, tuple[int, ...]]:
        """The inputs whose values must be equal too, by name."""
        return {self.names[read.place]: read.known.values for read in self.reads if read.place >= 0}

    @property
    def computed_values(self) -> tuple[ComputedValues, ...]:
        """What follows from inputs and must be equal too."""
        return tuple(
            ComputedValues(self._inputs_of(read), read.known.shape, read.known.values, read.where)
            for read in self.reads
            if read.place < 0
        )

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        return list(dict.fromkeys(map(self._note, self.reads)))

    def _note(self, read: ReadValues) -> str:
        where = read.where or "the model"
        if read.place < 0:
            return (
                f"{where}: forward reads in Python what follows from input {_names_text(self._inputs_of(read))}, so "
                "this plan is for calls with the same there: others are planned when they first come"
            )
        return (
            f"{where}: forward reads the values of input {self.names[read.place]!r} {list(self.shapes[read.place])} in "
            "Python, so this plan is for these values only: calls with others are planned when they first come"
        )

    def _inputs_of(self, read: ReadValues) -> tuple[str, ...]:
        return tuple(self.names[place] for place in read.computation.places)

    def cast_inputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a call in the dtypes of the trace."""
        cast = self.cast
        return [t.to(cast) if cast not in (None, t.dtype) and t.is_floating_point() else t for t in tensors]

    @property
    def inputs_text(self) -> str:
        """The tensors by name, as they came."""
        types = map(_type_text, self.shapes, self.dtypes)
        return ", ".join(f"{name} {text}" for name, text in zip(self.names, types, strict=True))

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args, kwargs`` for the model's forward, with `tensors` in place of the example's."""
        bound = inspect.BoundArguments(self.model_signature, rebuild(self.structure, tensors))
        return bound.args, bound.kwargs


def call_form(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], cast: torch.dtype | None
) -> tuple[CallForm, list[Tensor]]:
    """The form of an example call, and its tensors in order."""
    structure, tensors = describe(bind(model, args, kwargs), opaque_is_constant=True)
    _refuse_opaque(structure)
    leaves = [end for end in walk(structure) if isinstance(end, Leaf)]
    form = CallForm(
        inspect.signature(model.forward),
        signature_text(model),
        structure,
        tuple(tuple(t.shape) for t in tensors),
        tuple(t.dtype for t in tensors),
        tuple(_identifier(leaf.path) for leaf in leaves),
        cast,
    )
    if not tensors:
        raise ExampleInputsError(f"the example inputs hold no tensor; the model is called as {form.signature_text}")
    for name, x in zip(form.names, tensors, strict=True):
        if x.layout != torch.strided and not x.is_nested:
            raise ExampleInputsError(
                f"input {name!r} is sparse ({x.layout}), which no op is split for: pass {name}.to_dense()"
            )
    return form, tensors


def _refuse_opaque(structure: Structure) -> None:
    """Raise ExampleInputsError for objects whose tensors a program would keep as they are in the example."""
    for end in walk(structure):
        if not isinstance(end, Constant):
            continue
        if type(end.value).__module__ == "numpy" and getattr(end.value, "shape", ()):
            raise ExampleInputsError(
                f"argument {'.'.join(end.path)!r} is a NumPy array, which a program would keep as the example's: "
                "pass torch.from_numpy(array), and let forward compute with the tensor (ids.long() in place of "
                "torch.LongTensor(ids))"
            )
        if is_cache(end.value) or holds_tensors(end.value):
            instead = (
                "a cache of keys and values can't be carried from call to call, so leave it out, and pass the whole "
                "text; generate() does so"
                if is_cache(end.value)
                else "pass its tensors themselves, in tuples, lists, dicts or dataclasses, or in an object whose other "
                "attributes are numbers, text or what can be compared by =="
            )
            raise ExampleInputsError(
                f"argument {'.'.join(end.path)!r} is {kind_of(end.value)}, which a program can't look into: {instead}"
            )


def _identifier(path: tuple[str, ...]) -> str:
    return re.sub(r"\W", "_", "_".join(path)) or "input"


def make_flatten(form: CallForm) -> Callable[[Sequence[Any], Mapping[str, Any]], list[Tensor]]:
    """The function that checks a call against `form` and gives its tensors in the program's order; it can be pickled.

    It raises InputShapeError if structure, shape, dtype or a constant differs from the example inputs'.
    """
    return _Forward(form).flatten


@dataclass(frozen=True)
class _Forward:
    """Stands in for the model, so that the function above keeps no parameter alive."""

    form: CallForm

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        structure, result = describe(self._bind(args, kwargs), opaque_is_constant=True)
        _compare_ends(self.form.structure, structure)
        places = {end.path: end.index for end in walk(structure) if isinstance(end, Leaf)}
        # By path: a dict may list the same keys in another order.
        tensors = [result[places[end.path]] for end in walk(self.form.structure) if isinstance(end, Leaf)]
        for name, tensor, shape, dtype in zip(
            self.form.names, tensors, self.form.shapes, self.form.dtypes, strict=True
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise InputShapeError(
                    f"input {name!r} is {_type_text(tuple(tensor.shape), tensor.dtype)}, but the plan was made for "
                    f"{_type_text(shape, dtype)}. Pass inputs like the example's, or plan again for these"
                )
        made = self.form.cast_inputs(tensors)
        for read in self.form.reads:  # in order: what is computed later may hold only if these are equal
            self._compare_values(read, made)
        return made

    def _compare_values(self, read: ReadValues, tensors: Sequence[Tensor]) -> None:
        known = read.computation.known(tensors)
        if known is None or known[:2] != read.known[:2]:
            given = "no values" if known is None else f"the values {list(known.values)}"
            names = _names_text(tuple(self.form.names[place] for place in read.computation.places))
            what = f"input {names}" if read.place >= 0 else f"what follows from input {names}"
            raise InputShapeError(
                f"{what} has {given}, but the plan was made for {list(read.known.values)}, "
                f"which forward reads in Python ({read.where or 'in the model'}). Plan again for these"
            )

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        stand_in = nn.Module()
        stand_in.forward = _with_signature(self.form.model_signature)
        try:
            return bind(stand_in, args, kwargs)
        except ExampleInputsError as error:
            raise InputShapeError(f"the call does not fit {self.form.signature_text}: {error.__cause__}") from error


def _with_signature(signature: inspect.Signature) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(args, kwargs)

    forward.__signature__ = signature
    return forward


def _names_text(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))


def _type_text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _compare_ends(expected: Structure, given: Structure) -> None:
    want = {end.path: end for end in walk(expected)}
    have = {end.path: end for end in walk(given)}
    for path in [*want, *(p for p in have if p not in want)]:
        if not _agree(want.get(path), have.get(path)):
            raise InputShapeError(
                f"argument {'.'.join(path)!r} is {_end_text(have.get(path))}, but the plan was made for "
                f"{_end_text(want.get(path))}. Pass inputs like the example's, or plan again for these"
            )


def _agree(want: Any, have: Any) -> bool:
    if isinstance(want, Leaf) or isinstance(have, Leaf):
        return isinstance(want, Leaf) and isinstance(have, Leaf)
    if not isinstance(want, Constant) or not isinstance(have, Constant):
        return want is have
    if want.value is have.value:
        return True
    return type(want.value) is type(have.value) and bool(want.value == have.value)


def _end_text(end: Any) -> str:
    if end is None:
        return "absent"
    return "a tensor" if isinstance(end, Leaf) else repr(end.value)
