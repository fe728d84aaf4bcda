"""Inputs whose values forward reads in Python, such as the sizes of images, become constants of a trace.

A model that calls ``image_grid_thw.tolist()`` and cuts tensors into pieces of these sizes is another program for other
values, as one with other Python numbers is.  A trace with such an input takes the values of the call that is traced,
and its plan is for calls with equal values.  This holds for small integer inputs only: floats, what comes from
parameters, and ids of tokens are other ones in every batch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, fx

from autopar.errors import TraceError
from autopar.trace.calls.input_computations import Computation
from autopar.trace.calls.signature import MOST_READ, CallForm, ReadValues, can_be_read
from autopar.trace.compat import torch_recording
from autopar.trace.python_values.unknown_numbers import Names

__all__ = [
    "MOST_COMPUTED",
    "UnansweredError",
    "UnreadInputError",
    "ValueReadError",
    "also_asking",
    "inputs_behind",
    "known_values",
    "reading",
    "with_values",
    "with_values_of",
]

# What follows from an input's values, such as the places of patches in windows, is computed while tracing up to so
# many entries: an image of 7,000 by 7,000 pixels has fewer patches of 28 by 28.
MOST_COMPUTED = 1 << 16
# Of an input that forward only branches on: a few settings may be meant so, while ids of tokens are others in every
# batch, and to plan for each would take longer than the training.
_MOST_BRANCHED_ON = 16
_SYMBOLS = re.compile(r"\bz?uf?\d+\b")  # of numbers that depend on data, as torch names them


class UnansweredError(TraceError):
    """A trace can't go on without what follows from values; `asked` are the lines that ask what could be answered."""

    def __init__(self, message: str, asked: Collection[str] = ()) -> None:
        """`message` for the user."""
        super().__init__(message)
        self.asked = frozenset(asked)


class UnreadInputError(UnansweredError):
    """It follows from an input that is too large, or has no values here."""


class ValueReadError(UnansweredError):
    """Python needs a number that depends on data."""

    inputs: tuple[int, ...] = ()
    """The places of the inputs that it follows from, if it follows from nothing else."""
    where: str = ""
    """The user's line."""
    converted: tuple[Names, ...] = ()
    """The names of the modules that made a number of a tensor by ``int(x)`` or the like."""


@contextmanager
def also_asking(first: UnansweredError) -> Generator[None]:
    """Inside, errors name the lines of `first`, too: to answer them may help where values of inputs don't."""
    try:
        yield
    except UnansweredError as error:
        error.asked |= first.asked
        raise


def with_values(form: CallForm, tensors: Sequence[Tensor], error: ValueReadError) -> CallForm:
    """The form of calls with the values of the inputs that `error` names as well.

    Raises:
        TraceError: what `error` says, where their values don't help, are not known or are too many.
    """
    before = {read.place for read in form.reads}
    places = [place for place in error.inputs if place not in before]
    made: list[ReadValues] = []
    for place in places:
        computation, is_small = Computation((place,)), can_be_read(form.shapes[place], form.dtypes[place])
        known = computation.known(tensors) if is_small else None
        if known is None or not known.values:
            why = "has no values here" if is_small and known is None else f"has more than {MOST_READ:,} entries"
            raise UnreadInputError(
                f"{error}. It follows from input {form.names[place]!r} {list(form.shapes[place])}, which {why}: a plan "
                "could be for its values otherwise, and calls with others would be planned when they come",
                error.asked,
            ) from error
        made.append(ReadValues(computation, known, error.where))
    if not made:
        raise UnansweredError(str(error), error.asked) from error
    return replace(form, reads=(*form.reads, *made))


def with_values_of(form: CallForm, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The inputs of a trace under way, with constants for those whose values the form has."""
    made = list(tensors)
    for read in form.reads:
        if read.place >= 0:
            made[read.place] = read.known.tensor()
    return made


def inputs_behind(error: BaseException, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """In a trace that `error` ended, the places of the inputs that the number it asked for follows from.

    Empty if it follows from anything else as well, or from floats.
    """
    recorder = torch_recording.recorder()
    if recorder is None:
        return ()
    symbols = set(_SYMBOLS.findall(str(error).split("\n", 1)[0]))
    names = [getattr(recorder.node_of(x), "name", "") for x in tensors]
    return _integers(*torch_recording.sources_of(recorder.graph, symbols), names, tensors)


def reading(error: TraceError, graph: fx.Graph, names: Sequence[str], tensors: Sequence[Tensor]) -> ValueReadError:
    """`error`, which a graph has caused with numbers that depend on data; `names` are those of its inputs."""
    made = ValueReadError(str(error))
    made.inputs = _integers(*torch_recording.sources_of(graph), names, tensors)
    made.where = str(error).split(": ", 1)[0]
    return made


def _integers(
    sources: Sequence[fx.Node], is_truth: bool, names: Sequence[str], tensors: Sequence[Tensor]
) -> tuple[int, ...]:
    """The places of `sources` among the inputs, if all of them are inputs of integers, and small ones for a truth
    value.
    """
    places = [names.index(node.name) if node.name in names else -1 for node in sources]
    if min(places, default=-1) < 0:
        return ()
    behind = [tensors[place] for place in places]
    is_other = any(x.is_floating_point() or (is_truth and x.numel() > _MOST_BRANCHED_ON) for x in behind)
    return () if is_other else tuple(sorted(places))


@contextmanager
def known_values() -> Generator[None]:
    """Inside, torch knows the values of ranges of integers, and of tensors made of known numbers.

    So it knows those of what is computed from them.
    """
    plain, plain_tensor = torch.arange, torch.tensor

    def arange(*args: Any, **kwargs: Any) -> Tensor:
        dtype = kwargs.get("dtype") or torch.int64
        # On device meta torch computes shapes of other ops, next to other tensors of that device.
        is_plain = kwargs.keys() <= {"dtype", "device"} and all(type(x) is int for x in args) and not _is_meta(kwargs)
        if not is_plain or dtype.is_floating_point or len(range(*args)) > MOST_COMPUTED:
            return plain(*args, **kwargs)
        return plain_tensor(range(*args), dtype=dtype)

    def tensor(data: Any, **kwargs: Any) -> Tensor:
        is_plain = isinstance(data, list) and kwargs.keys() <= {"dtype", "device"} and not _is_meta(kwargs)
        numbers = cast("list[Any]", data) if is_plain else []
        if numbers and all(isinstance(x, Tensor) and not x.dim() for x in numbers):
            return torch.stack(numbers).to(kwargs.get("dtype") or numbers[0].dtype)
        return plain_tensor(data, **kwargs)

    with patch.object(torch, "arange", arange), patch.object(torch, "tensor", tensor):
        yield


def _is_meta(kwargs: Mapping[str, Any]) -> bool:
    return str(kwargs.get("device")) == "meta"
