"""Record how tensors are initialized without computing them, and play it back one tensor at a time.

Inside a `Tape` the tensors that ops make are on the meta device, and every op that would write values is noted.  `play`
runs the notes in order on real tensors.  All ops run, so that random numbers are drawn as they would have been; but
memory is taken at an op's first note of a tensor and given back after the last, and between a value and the next that
replaces it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import MaterializationError
from autopar.lower.compat import (
    DispatchMode,
    is_random,
    leaves_of,
    map_leaves,
    storage_key,
    takes_device,
    whole_initializers,
    written_arguments,
)

__all__ = ["Tape", "TapeError"]

_LARGE = 1 << 16  # elements; what is fixed and smaller than this is computed at once, so that Python may look at it
_EMPTY = frozenset(["empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"])
_FILLED = frozenset(["zeros", "ones", "full", *_EMPTY])
# In-place ops that look at no old value.
_FRESH = frozenset(["normal_", "uniform_", "fill_", "zero_", "copy_", "random_", "exponential_", "bernoulli_"])


class TapeError(MaterializationError):
    """Something that can't be written down: values that depend on other values, by way of Python."""


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor: which memory it looks at, and how."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    num_bytes: int  # of the whole memory

    def is_whole(self) -> bool:
        count = 1
        for size in self.shape:
            count *= size
        return self.offset == 0 and count * self.dtype.itemsize == self.num_bytes


@dataclass(frozen=True)
class _Note:
    """One call: `made` are its results in memory of their own, `fresh` the memory that it replaces whole."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[_Slot | None, ...]
    touched: frozenset[int]
    fresh: frozenset[int]


class Tape:
    """What happened to tensors while it ran; see the module."""

    def __init__(self) -> None:
        self._notes: list[_Note] = []
        self._alive: dict[int, Any] = {}  # memory that is noted, so that its key is given to no other
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        self._stack.enter_context(torch.no_grad())
        self._stack.enter_context(whole_initializers(self._note_whole))
        self._stack.enter_context(_AsIfReal())
        self._stack.enter_context(_InitRecorder(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def play(self, results: Mapping[str, Tensor], device: torch.device, deliver: Callable[[str, Tensor], None]) -> None:
        """Compute `results`, tensors made while the tape ran, on `device`; `deliver` gets each as soon as it is done.

        What is delivered lives no longer than the call, and is nan where a floating tensor was never written to.
        """
        slots: dict[int, list[tuple[str, _Slot]]] = {}
        for name, tensor in results.items():
            if tensor.is_meta:
                slot = self._slot(tensor)
                slots.setdefault(slot.storage, []).append((name, slot))
            else:
                deliver(name, tensor.detach().to(device))
        with torch.no_grad():
            _Player(self._notes, slots, device, deliver).run()

    def missing(self, results: Mapping[str, Tensor]) -> list[str]:
        """The names of those of `results` that no call writes to."""
        touched = {key for note in self._notes for key in note.touched}
        return [name for name, x in results.items() if x.is_meta and storage_key(x) not in touched]

    def mark(self) -> int:
        """Where the tape stands."""
        return len(self._notes)

    def rewind(self, mark: int) -> None:
        """Forget what was written down since `mark`."""
        del self._notes[mark:]

    def note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> None:
        """Write down a call that ran on meta tensors, unless it only made a view or memory without values."""
        inputs = [self._slot(x) for x in leaves_of((args, kwargs)) if isinstance(x, Tensor) and x.is_meta]
        known = {slot.storage for slot in inputs}
        outputs = [self._slot(x) if isinstance(x, Tensor) else None for x in leaves_of(results)]
        made = tuple(slot if slot is not None and slot.storage not in known else None for slot in outputs)
        written = [self._slot(x) for x in written_arguments(function, args, kwargs) if x.is_meta]
        name = _name(function)
        if name in _EMPTY or (not written and not any(made)):
            return
        fresh = {slot.storage for slot in made if slot is not None}
        if name in _FRESH and sum(slot.storage == written[0].storage for slot in inputs) == 1 and written[0].is_whole():
            fresh.add(written[0].storage)
        positional, named = map_leaves(self._reference, (tuple(args), dict(kwargs)))
        touched = frozenset(known | {slot.storage for slot in made if slot is not None})
        self._notes.append(_Note(function, positional, named, made, touched, frozenset(fresh)))

    def _note_whole(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Write down a function that gives `tensor` its values and can't be run on meta tensors."""
        slot = self._slot(tensor)
        touched = frozenset([slot.storage])
        fresh = touched if slot.is_whole() else frozenset[int]()
        self._notes.append(_Note(function, (slot, *args), kwargs, (), touched, fresh))
        return tensor

    def _reference(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return self._slot(x) if x.is_meta else x.detach().clone()  # it may be written to before the tape is played

    def _slot(self, x: Tensor) -> _Slot:
        storage = x.untyped_storage()
        key = storage_key(x)
        self._alive[key] = storage
        return _Slot(key, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype, storage.nbytes())


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", "")).split(".")[0]


class _AsIfReal(TorchFunctionMode):
    """Inside, nobody sees that a tensor is on the meta device: some initializers do nothing for those."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.is_meta.__get__:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            return False
        if func == Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class _InitRecorder(DispatchMode):
    """Runs ops on meta tensors and notes them; what is small and fixed is computed."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        if not any(x.is_meta for x in tensors) and not self._is_deferred(
            func, args, kwargs, has_operands=bool(tensors)
        ):
            return func(*args, **kwargs)
        if any(not x.is_meta for x in written_arguments(func, args, kwargs)):
            raise TapeError(f"{func} writes what is not known yet into a tensor that has values already")
        results = self._on_meta(func, args, kwargs)
        self._tape.note(func, args, kwargs, results)
        return results

    def _is_deferred(self, func: Any, args: Any, kwargs: dict[str, Any], *, has_operands: bool) -> bool:
        if is_random(func):
            if has_operands and written_arguments(func, args, kwargs):
                raise TapeError(f"{func} draws into a tensor that has values already")
            return True
        if has_operands:
            return False
        if _name(func) in _FILLED or kwargs.get("device") == torch.device("meta"):
            return True
        results = self._on_meta(func, args, kwargs)
        return any(isinstance(x, Tensor) and x.numel() > _LARGE for x in leaves_of(results))

    def _on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        args, kwargs = map_leaves(_to_meta, (args, kwargs))
        if takes_device(func):
            kwargs["device"] = torch.device("meta")
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise TapeError(f"{func} needs values that are not known yet: {error}") from error


def _to_meta(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x


class _Player:
    """One play of a tape: `real` holds memory by its key, as flat tensors."""

    def __init__(
        self,
        notes: Sequence[_Note],
        results: Mapping[int, Sequence[tuple[str, _Slot]]],
        device: torch.device,
        deliver: Callable[[str, Tensor], None],
    ) -> None:
        self._notes = notes
        self._results = results
        self._device = device
        self._deliver = deliver
        self._real: dict[int, Tensor] = {}

    def run(self) -> None:
        following = self._following()
        for index, note in enumerate(self._notes):
            self._run(note)
            for key in note.touched:
                after = following[index][key]
                if after is None:
                    self._finish(key)
                elif key in after.fresh:
                    self._real.pop(key, None)

    def _following(self) -> list[dict[int, _Note | None]]:
        """Per note and memory that it touches, the next note that does."""
        following: list[dict[int, _Note | None]] = []
        latest: dict[int, _Note] = {}
        for note in reversed(self._notes):
            following.append({key: latest.get(key) for key in note.touched})
            latest.update(dict.fromkeys(note.touched, note))
        return following[::-1]

    def _run(self, note: _Note) -> None:
        args, kwargs = map_leaves(self._value, (note.args, dict(note.kwargs)))
        if takes_device(note.function):
            kwargs["device"] = self._device
        results = leaves_of(note.function(*args, **kwargs))
        for slot, result in zip(note.made, results, strict=False):
            if slot is not None:
                self._real[slot.storage] = _flat(result, slot)

    def _value(self, x: Any) -> Any:
        if isinstance(x, _Slot):
            return self._look(x)
        return x.to(self._device) if isinstance(x, Tensor) else x

    def _look(self, slot: _Slot) -> Tensor:
        if slot.storage not in self._real:
            self._real[slot.storage] = self._memory(slot)
        flat = self._real[slot.storage]
        flat = flat if flat.dtype == slot.dtype else flat.view(slot.dtype)
        return flat.as_strided(slot.shape, slot.stride, slot.offset)

    def _memory(self, slot: _Slot) -> Tensor:
        """Memory that nobody wrote to: it says so where it can."""
        count = slot.num_bytes // slot.dtype.itemsize
        memory = torch.empty(count, dtype=slot.dtype, device=self._device)
        return memory.fill_(torch.nan) if slot.dtype.is_floating_point else memory.zero_()

    def _finish(self, key: int) -> None:
        for name, slot in self._results.get(key, ()):
            self._deliver(name, self._look(slot))
        self._real.pop(key, None)


def _flat(result: Tensor, slot: _Slot) -> Tensor:
    """All of the memory of `result`, with the offset and strides of `slot`."""
    if result.stride() != slot.stride or result.storage_offset() != slot.offset:
        laid = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=result.device)
        result = laid.copy_(result)
    return result.as_strided((slot.num_bytes // slot.dtype.itemsize,), (1,), 0)
