"""What lists, dicts, sets, tensors and functions among attributes held, to tell later whether they still do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.objects.attribute_owners import is_plain, is_record
from autopar.objects.tensor_versions import version_of

__all__ = ["Contents", "contents_of", "current_value", "has_contents", "has_only_values", "is_compared"]

_CONTAINERS = (list, tuple, dict, set, frozenset)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
_LEAVES = (bytes, range, torch.device)
_DEEPEST = 16  # far more than options are nested; beyond it, and so in circles, objects count as themselves


@dataclass(frozen=True)
class Contents:
    """What a container, a tensor or a function was.

    Attributes:
        form: equal for equal contents, types and order included.
        text: for people and for ranks to compare.
        value: a copy, where a model can be traced with it; else None.
    """

    form: object
    text: str = field(compare=False)
    value: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        """As Python writes it."""
        return self.text


@dataclass(frozen=True, eq=False)
class _Itself:
    """An object that is compared by identity; a tensor also by how often it was written to."""

    value: object
    version: int | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value and self.version == other.version

    def __hash__(self) -> int:
        return id(self.value)


def is_compared(value: object) -> bool:
    """Whether an attribute with this value is compared by `contents_of`."""
    if isinstance(value, nn.Parameter) or is_plain(value):
        return False
    return isinstance(value, (*_CONTAINERS, *_FUNCTIONS, Tensor))


def has_contents(value: object, contents: Contents) -> bool:
    """Whether `contents_of` the value would be these."""
    if isinstance(value, _FUNCTIONS):  # as most values are: each module of Hugging Face's models has two of its own
        return isinstance(contents.form, _Itself) and contents.form.value is value
    return _form(value, [], 0) == contents.form


def has_only_values(value: object) -> bool:
    """Whether there is nothing in it but plain values, so that a model can be traced with a copy."""
    found: list[object] = []
    _form(value, found, 0)
    return not found


def contents_of(value: object, *, copies: bool = False) -> Contents:
    """What it is now; with a copy on request, where it has nothing but plain values."""
    found: list[object] = []
    form = _form(value, found, 0)
    return Contents(form, _text(value, bool(found)), copy.deepcopy(value) if copies and not found else None)


def current_value(value: Any) -> Any:
    """What an attribute is set to for a value of settings, which several calls have."""
    return copy.deepcopy(value.value) if isinstance(value, Contents) else value


def _form(value: object, found: list[object], depth: int) -> object:
    """The form; objects in it that have none are added to `found`."""
    kind = type(value)
    if (kind is not tuple and is_plain(value)) or isinstance(value, _LEAVES):
        return kind, value
    if depth < _DEEPEST and isinstance(value, dict):
        entries = cast("Mapping[Any, Any]", value).items()
        return kind, tuple((_form(k, found, depth + 1), _form(x, found, depth + 1)) for k, x in entries)
    if depth < _DEEPEST and isinstance(value, _CONTAINERS):
        forms = [_form(x, found, depth + 1) for x in cast("list[Any]", value)]
        return kind, frozenset(forms) if isinstance(value, (set, frozenset)) else tuple(forms)
    if depth < _DEEPEST and is_record(value):
        return kind, tuple((name, _form(x, found, depth + 1)) for name, x in vars(value).items())
    found.append(value)
    if isinstance(value, nn.Parameter):  # as recurrent modules list theirs, which the optimizer writes to
        return nn.Parameter, None
    return _Itself(value, version_of(value) if isinstance(value, Tensor) else None)


def _text(value: Any, has_objects: bool) -> str:
    """Equal on ranks with equal contents."""
    if isinstance(value, _FUNCTIONS):
        return f"the function {value.__name__}"
    if has_objects:
        kind = cast("type[object]", type(value)).__name__
        return f"a {kind} of objects" if isinstance(value, _CONTAINERS) else f"a {kind}"
    return _written(value)


def _written(value: object) -> str:
    """As Python writes it, but sets in order and records without addresses."""
    if isinstance(value, dict):
        entries = cast("Mapping[Any, Any]", value).items()
        return f"{{{', '.join(f'{_written(k)}: {_written(x)}' for k, x in entries)}}}"
    if isinstance(value, _CONTAINERS):
        texts = [_written(x) for x in cast("list[Any]", value)]
        if isinstance(value, (set, frozenset)):
            return f"{{{', '.join(sorted(texts))}}}"
        return f"[{', '.join(texts)}]" if isinstance(value, list) else f"({', '.join(texts)})"
    if is_plain(value) or isinstance(value, _LEAVES):
        return repr(value)
    own = ", ".join(f"{name}={_written(x)}" for name, x in vars(value).items())
    return f"{type(value).__name__}({own})"
