"""Attributes that `forward` sets: ``self.aux_loss = ...``, ``self.attention_maps.append(...)``, ``self.calls += 1``.

Whoever reads them after a call finds what that call set, as on one device: they are outputs of the program.  Three
kinds are not.  A value that forward makes once for all calls, as a mask of its length, is made anew in each program.
A number that forward reads and changes would be another program in each call, so it stays as it is; that is said if the
program is the same with both values, and refused otherwise.  A tensor that a call reads, and the call before has set,
must be a buffer, unless the program is the same with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import ExampleInputsError
from autopar.objects.attribute_owners import is_plain
from autopar.objects.tensor_versions import is_unwritten, version_of
from autopar.trace.calls.model_outputs import AssignedAttribute, add_to
from autopar.trace.calls.structure import Structure, describe, move_leaves, rebuild
from autopar.trace.module_attributes.attribute_reads import Reads
from autopar.trace.python_values.recorded_computations import depend_on_calls

__all__ = ["AttributeWatch", "Changed"]


@dataclass(frozen=True)
class Changed:
    """An attribute that forward reads and sets.

    Args:
        path: of the module.
        name: of the attribute.
        before: the value before it; an object of its own if there was none.
        structure: of the value after it.
        forms: shape and dtype of the tensors there.
    """

    path: str
    name: str
    before: Any
    structure: Structure
    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def is_plain(self) -> bool:
        """Whether it has no tensors."""
        return not self.forms

    def value(self) -> Any:
        """One like that after a forward, with numbers in tensors that are hardly those of before."""
        return rebuild(self.structure, [torch.full(shape, 7, dtype=dtype) for shape, dtype in self.forms])


_MISSING: Any = object()
_NEVER = frozenset(vars(nn.Module()))


class Found:
    """What a forward has set.

    Attributes:
        assigned: attributes that are to be set after a call.
        tensors: those in their values.
        changed: attributes that were read before they were set.
    """

    def __init__(self, first: int) -> None:
        """Nothing; `first` is the place of the first tensor."""
        self.assigned: list[AssignedAttribute] = []
        self.tensors: list[Tensor] = []
        self.changed: list[Changed] = []
        self._first = first

    def add(self, path: str, name: str, value: Any, *, is_added: bool) -> None:
        """Set the attribute to this, or add this to what it has."""
        structure, tensors = describe(value)
        moved = move_leaves(structure, self._first + len(self.tensors))
        self.assigned.append(AssignedAttribute(path, name, moved, is_added))
        self.tensors.extend(tensors)


class AttributeWatch:
    """The attributes of a model's modules before its `forward`."""

    def __init__(self, model: nn.Module, reads: Reads) -> None:
        """`reads` are those of that forward."""
        modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        self._owners = {path: vars(module) for path, module in modules}
        self._before = {path: dict(own) for path, own in self._owners.items()}
        self._contents: dict[tuple[str, str], Any] = {
            (path, name): copy.copy(value)
            for path, own in self._owners.items()
            for name, value in own.items()
            if type(value) in (list, dict) and name not in _NEVER
        }
        self._state = {id(x) for x in (*model.parameters(), *model.buffers())}
        self._versions = [(buffer, version_of(buffer)) for buffer in model.buffers()]
        self._reads = reads

    def restore(self, first: int) -> Found:
        """Set all attributes to what they were before, and say what they were set to.

        `first` is how many tensors the program puts out before those of attributes.
        """
        found = Found(first)
        for (path, name), before in self._contents.items():
            now: Any = self._owners[path].get(name)
            if now is self._before[path][name]:
                if new := _added(now, before):
                    found.add(path, name, new, is_added=True)
                    self._reads.found.discard((path, name))
                now.clear()
                add_to(now, before)
        for path, name, before, now in self._set():
            self._note(found, path, name, before, now)
        for path, own in self._owners.items():
            before = self._before[path]
            for name in own.keys() - before.keys():
                del own[name]
            own.update(before)
        return found

    def begin_second(self, model: nn.Module) -> None:
        """Between two calls in one trace: what the first has set to tensors of its own, the second must not compute
        with, so there is something else; what follows from buffers alone is what the second would have set.  The same
        holds for what the first has written to buffers, which may also follow from parameters that are not trained.

        Raises:
            ExampleInputsError: a list or dict has changed.
        """
        for (path, name), before in self._contents.items():
            now: Any = self._owners[path].get(name)
            if now is self._before[path][name] and _added(now, before):
                raise ExampleInputsError(f"forward adds to {name!r}, so that calls differ")
        buffers = [*model.buffers()]
        for path, name, before, now in [*self._set()]:
            structure, tensors = describe(now)
            if depend_on_calls(tensors, other_than=buffers):
                forms = tuple((tuple(x.shape), x.dtype) for x in tensors)
                self._owners[path][name] = Changed(path, name, before, structure, forms).value()
        fixed = [*buffers, *(p for p in model.parameters() if not p.requires_grad)]
        with torch.no_grad():
            for buffer in buffers:
                if depend_on_calls([buffer], other_than=fixed):
                    buffer.fill_(7)

    def _note(self, found: Found, path: str, name: str, before: Any, now: Any) -> None:
        structure, tensors = describe(now)
        is_read = (path, name) in self._reads.found
        is_read |= before is _MISSING and (path, name) in self._reads.missing
        if is_read and is_plain(before) and is_plain(now):
            found.changed.append(Changed(path, name, before, structure, ()))
        elif is_read and not depend_on_calls(
            tensors, constants_too=isinstance(before, Tensor), other_than=[] if before is not None else self._fixed()
        ):
            return  # made once, for all calls
        elif is_plain(now) or (tensors and not any(id(x) in self._state for x in tensors)):
            if is_read and not (is_plain(before) and before is not None):
                forms = tuple((tuple(x.shape), x.dtype) for x in tensors)
                found.changed.append(Changed(path, name, before, structure, forms))
            found.add(path, name, now, is_added=False)

    def _fixed(self) -> list[Tensor]:
        """The buffers that the forward has not written to."""
        return [buffer for buffer, version in self._versions if is_unwritten(buffer, version)]

    def _set(self) -> Iterable[tuple[str, str, Any, Any]]:
        for path, own in self._owners.items():
            for name, now in own.items():
                before = self._before[path].get(name, _MISSING)
                if now is before or name in _NEVER or (is_plain(now) and is_plain(before) and now == before):
                    continue
                yield path, name, before, now


def _added(now: Any, before: Any) -> Any:
    """What a list has at its end, or a dict, that was not there; of dicts only what is new in each call."""
    if isinstance(now, list):
        longer = cast("list[Any]", now)
        is_longer = len(longer) > len(before) and all(x is y for x, y in zip(longer, before, strict=False))
        return longer[len(before) :] if is_longer else []
    new = {key: x for key, x in now.items() if before.get(key, _MISSING) is not x}
    return new if depend_on_calls(describe(new)[1]) else {}
