"""Attributes that `forward` sets: ``self.aux_loss = ...``, ``self.attention_maps.append(...)``, ``self.calls += 1``.

Whoever reads them after a call finds what that call set, as on one device: they are outputs of the program.  Three
kinds are not.  A value that forward makes once for all calls, as a mask of its length, is made anew in each program.
A number that forward reads and changes would be another program in each call, so it stays as it is; that is said if the
program is the same with both values, and refused otherwise.  A tensor that is passed on from one call to the next must
be a buffer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.objects.attribute_owners import is_plain, joined
from autopar.trace import torch_recording
from autopar.trace.attribute_reads import Reads
from autopar.trace.model_outputs import Assignment, add_to
from autopar.trace.structure import describe, move_leaves

__all__ = ["AttributeWatch", "Changed"]

Changed = tuple[str, str, Any, Any]
"""A plain value that forward reads and changes: path of the module, attribute, before and after."""

_MISSING: Any = object()
_NEVER = frozenset(vars(nn.Module()))


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
        self._reads = reads

    def restore(self, first: int) -> tuple[tuple[Assignment, ...], list[Tensor], tuple[Changed, ...]]:
        """Set all attributes to what they were before.

        Args:
            first: how many tensors the program puts out before those of attributes.

        Returns:
            What had been assigned, its tensors, and which plain values that were read had changed.

        Raises:
            TraceError: a tensor is passed on from call to call.
        """
        assigned: list[Assignment] = []
        tensors: list[Tensor] = []
        changed: list[Changed] = []

        def add(path: str, name: str, value: Any, *, is_added: bool) -> None:
            structure, own = describe(value)
            assigned.append(Assignment(path, name, move_leaves(structure, first + len(tensors)), is_added))
            tensors.extend(own)

        for (path, name), before in self._contents.items():
            now: Any = self._owners[path].get(name)
            if now is self._before[path][name]:
                if new := _added(now, before):
                    add(path, name, new, is_added=True)
                    self._reads.found.discard((path, name))
                now.clear()
                add_to(now, before)
        for path, name, before, now in self._set():
            is_read = (path, name) in self._reads.found
            if is_read and is_plain(before) and is_plain(now):
                changed.append((path, name, before, now))
            elif self._is_kept(now) and not self._is_made_once(path, name, before, now):
                add(path, name, now, is_added=False)
        for path, own in self._owners.items():
            before = self._before[path]
            for name in own.keys() - before.keys():
                del own[name]
            own.update(before)
        return tuple(assigned), tensors, tuple(changed)

    def _set(self) -> Iterable[tuple[str, str, Any, Any]]:
        for path, own in self._owners.items():
            for name, now in own.items():
                before = self._before[path].get(name, _MISSING)
                if now is before or name in _NEVER or (is_plain(now) and is_plain(before) and now == before):
                    continue
                yield path, name, before, now

    def _is_kept(self, value: Any) -> bool:
        """Whether a script can find something in it: a plain value, or tensors that are no parameters or buffers."""
        tensors = describe(value)[1]
        return is_plain(value) or (bool(tensors) and not any(id(x) in self._state for x in tensors))

    def _is_made_once(self, path: str, name: str, before: Any, now: Any) -> bool:
        """Whether forward looks whether it is there, and makes it of nothing that differs between calls.

        Raises:
            TraceError: of something that does, so that later calls would find what the first one made.
        """
        is_read, was_missing = (path, name) in self._reads.found, (path, name) in self._reads.missing
        tensors = describe(now)[1]
        if not tensors or not (is_read or (was_missing and before is _MISSING)):
            return False
        if not torch_recording.depend_on_calls(tensors, constants_too=isinstance(before, Tensor)):
            return True
        if isinstance(before, Tensor) or was_missing:
            raise TraceError(
                f"forward reads {joined(path, name)!r} and sets it to a tensor that depends on the call, so that the "
                "next call would read it, which a program can do with buffers only: register it with register_buffer"
            )
        return False  # such as None: that the next call finds something else is noticed before it runs


def _added(now: Any, before: Any) -> Any:
    """What a list has at its end, or a dict, that was not there; of dicts only what is new in each call."""
    if isinstance(now, list):
        longer = cast("list[Any]", now)
        is_longer = len(longer) > len(before) and all(x is y for x, y in zip(longer, before, strict=False))
        return longer[len(before) :] if is_longer else []
    new = {key: x for key, x in now.items() if before.get(key, _MISSING) is not x}
    return new if torch_recording.depend_on_calls(describe(new)[1]) else {}
