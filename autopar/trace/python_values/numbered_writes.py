"""Writes to places that a number of a buffer gives, as to a queue: ``self.queue[:, first : first + count] = keys``.

The number stays unknown to the trace: the places are computed from the buffer, as a tensor, so that one program serves
all of them.  Only writes: what is read by such a slice is a view, which an index is not.

A roll by a number of any tensor (``torch.roll(x, -int(index[i]), -1)``) is an index, too.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.trace.compat import torch_recording
from autopar.trace.compat.source_lines import user_line
from autopar.trace.python_values.asked_values import AskedValues

__all__ = ["NumberedWrites"]


_ROLLS: tuple[Any, ...] = (torch.roll, Tensor.roll)


class NumberedWrites(TorchFunctionMode):
    """In this context, writes take unknown numbers of buffers as tensors: where they write, and what.  Rolls take those
    of other tensors, too.
    """

    def __init__(self, asked: AskedValues, passed: set[str]) -> None:
        """Nothing is written yet.

        Args:
            asked: knows what follows from buffers.
            passed: gets the user's lines that ask for numbers which are computed with so.
        """
        super().__init__()
        self._asked = asked
        self._passed = passed
        self._numbers: dict[str, Tensor] = {}  # by their symbols: scalars
        self._others: dict[str, Tensor] = {}  # likewise, of tensors that don't follow from buffers
        self._lines: dict[str, str] = {}
        self._item, self._set, self._fill = Tensor.item, Tensor.__setitem__, Tensor.fill_

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        if func is self._item:
            return self._noted(args[0])
        if func in _ROLLS and (self._numbers or self._others):
            return self._rolled(func, *args, **(kwargs or {}))
        if not self._numbers or kwargs or func not in (self._set, self._fill):
            return func(*args, **(kwargs or {}))
        x, *keys, value = args
        if not keys:
            return func(x, self._known(value))
        return func(x, *_placed(x, keys[0], self._known(value), self._tensor))

    def _noted(self, x: Tensor) -> Any:
        """``x.item()``; if that is a number of a buffer that the trace does not know, its tensor as it is now."""
        follows = not x.is_floating_point() and self._asked.follows_from_buffers(x)
        number = x.item()
        symbol = None if x.is_floating_point() else torch_recording.symbol_of(number)
        if symbol is not None:
            known = self._numbers if follows else self._others
            known[symbol] = x.detach().reshape(()).long().clone()
            self._lines[symbol] = user_line()
        return number

    def _tensor(self, number: Any, others: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor | None:
        """A number that follows from noted ones as a scalar, whose lines need no answer then; or None."""
        result = torch_recording.tensor_of_number(number, {**self._numbers, **others})
        if result is not None:
            self._passed |= {self._lines[symbol] for symbol in torch_recording.symbols_of(number)}
        return result

    def _rolled(self, roll: Any, input: Any, shifts: Any, dims: Any = ()) -> Any:
        """``torch.roll``, with an index along dims where the shift is an unknown number."""
        given, along = _as_tuple(shifts), _as_tuple(dims)
        known: list[Any] = [self._tensor(by, self._others) if isinstance(by, torch.SymInt) else by for by in given]
        is_usual = not any(isinstance(by, Tensor) for by in known) or any(by is None for by in known)
        if is_usual or len(given) != len(along):
            return roll(input, shifts, dims)
        x = input
        for by, dim in zip(known, along, strict=True):
            size = x.shape[dim]
            x = x.index_select(dim, (torch.arange(size, device=x.device) - by) % size)
        return x

    def _known(self, value: Any) -> Any:
        tensor = self._tensor(value) if isinstance(value, torch.SymInt) else None
        return value if tensor is None else tensor


def _placed(x: Tensor, key: Any, value: Any, tensor_of: Callable[[Any], Tensor | None]) -> tuple[Any, Any]:
    """A key of `x` with an index in place of its one unknown number, or slice from such a number on; and the value.

    They are what is given if the places can't be told.
    """
    parts = list(cast("tuple[Any, ...]", key)) if isinstance(key, tuple) else [key]
    unknown = [at for at, part in enumerate(parts) if _is_unknown(part)]
    others = [part for at, part in enumerate(parts) if at not in unknown]
    if len(unknown) != 1 or not all(isinstance(part, slice | EllipsisType) for part in others):
        return key, value
    (at,) = unknown
    num_behind = (len(parts) if Ellipsis in parts[:at] else x.dim()) - 1 - at
    if Ellipsis in parts[at:]:
        return key, value
    is_number = isinstance(parts[at], torch.SymInt)
    size = _size_written(value, num_behind)
    places = tensor_of(parts[at]) if is_number else _places(parts[at], size, tensor_of)
    if places is None:
        return key, value
    parts[at] = places.to(x.device).reshape(-1)  # torch asks for the number of a scalar
    value = value.to(x.dtype) if isinstance(value, Tensor) else value  # an index casts nothing
    return tuple(parts), value.unsqueeze(-1 - num_behind) if is_number and size is not None else value


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", given)) if isinstance(given, list | tuple) else (given,)


def _is_unknown(part: Any) -> bool:
    ends = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    return any(isinstance(end, torch.SymInt) for end in ends)


def _size_written(value: Any, num_behind: int) -> int | None:
    """How many entries `value` has along the dim before its last `num_behind` ones."""
    return value.shape[-1 - num_behind] if isinstance(value, Tensor) and value.dim() > num_behind else None


def _places(part: slice, written: int | None, tensor_of: Callable[[Any], Tensor | None]) -> Tensor | None:
    """The places of a slice of known length, which is not cut off at the end: as many as are `written`.

    A value that is broadcast may be written to fewer places, so that these can't be told.
    """
    length = torch_recording.difference(part.stop, part.start)
    if length is None or length < 2 or length != written or part.step not in (None, 1):
        return None
    first = tensor_of(part.start)
    return None if first is None else first + torch.arange(length, device=first.device)
