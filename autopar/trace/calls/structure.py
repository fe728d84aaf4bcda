"""Structures of inputs and outputs: nested containers taken apart into tensors, and rebuilt.

A structure is walked with ``torch.utils._pytree`` (which knows tuples, lists, dicts and every class
registered with it) and, beyond that, into dataclasses that nobody registered, ``torch.distributions``, and, in
arguments, plain objects whose attributes hold tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import Distribution, Transform

from autopar.trace.compat.flex_attention import BlockMaskForm, open_block_mask
from autopar.trace.compat.torch_internals import flatten_one_level, unflatten

__all__ = [
    "Branch",
    "Constant",
    "Dropped",
    "Leaf",
    "Structure",
    "attributes_of_objects",
    "carried",
    "changed_objects",
    "describe",
    "holds_tensors",
    "is_cache",
    "move_leaves",
    "rebuild",
    "walk",
]


@dataclass(frozen=True)
class Leaf:
    """A tensor: its place in the flat list, and the path of keys that leads to it."""

    index: int
    path: tuple[str, ...]


@dataclass(frozen=True)
class Constant:
    """Something that is no tensor and stays as it is."""

    value: Any
    path: tuple[str, ...]


@dataclass(frozen=True)
class Dropped:
    """An object that can't be looked into; it comes back as None."""

    type_name: str
    path: tuple[str, ...]


@dataclass(frozen=True)
class Branch:
    """A container; `context` says how to put `children` together again."""

    context: Any
    children: tuple[Structure, ...]


Structure = Leaf | Constant | Dropped | Branch

_PLAIN = (
    type(None), numbers.Number, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, torch.Size,
    torch.memory_format, range, slice, type, BlockMaskForm,
)  # fmt: skip


def describe(value: Any, *, opaque_is_constant: bool = False) -> tuple[Structure, list[Tensor]]:
    """The structure of `value` and its tensors in order.

    Objects that are neither containers nor plain values become `Dropped`, or with `opaque_is_constant`, as of
    arguments, `Constant`, if they are not looked into.
    """
    tensors: list[Tensor] = []

    def visit(part: Any, path: tuple[str, ...]) -> Structure:
        if isinstance(part, Tensor):
            tensors.append(part)
            return Leaf(len(tensors) - 1, path)
        if isinstance(part, _PLAIN):
            return Constant(part, path)
        opened = flatten_one_level(part) or _open_block_mask(part) or _open_dataclass(part) or _open_distribution(part)
        if opened is None and opaque_is_constant:  # what a model returns so is a cache, mostly
            opened = _open_object(part)
        if opened is None:
            return Constant(part, path) if opaque_is_constant else Dropped(type(part).__qualname__, path)
        keys, children, context = opened
        return Branch(context, tuple(visit(c, (*path, k)) for k, c in zip(keys, children, strict=True)))

    return visit(value, ()), tensors


def rebuild(structure: Structure, entries: Sequence[Any]) -> Any:
    """The inverse of `describe`: containers of the same classes around `entries`, one per tensor."""
    if isinstance(structure, Leaf):
        return entries[structure.index]
    if isinstance(structure, Constant):
        return structure.value
    if isinstance(structure, Dropped):
        return None
    children = [rebuild(child, entries) for child in structure.children]
    if isinstance(structure.context, _DataclassContext | _DistributionContext | _ObjectContext):
        return structure.context.build(children)
    if structure.context is BlockMaskForm:
        return children[-1].build(children[:-1])
    return unflatten(children, structure.context)


def walk(structure: Structure) -> list[Leaf | Constant | Dropped]:
    """The ends of `structure`, in order."""
    if isinstance(structure, Branch):
        return [end for child in structure.children for end in walk(child)]
    return [structure]


@dataclass(frozen=True)
class _DataclassContext:
    kind: type[Any]
    names: tuple[str, ...]

    def build(self, children: Sequence[Any]) -> Any:
        # Not through __init__: it may take other arguments, and its work is already in the fields.
        made: Any = object.__new__(self.kind)
        for name, child in zip(self.names, children, strict=True):
            object.__setattr__(made, name, child)
        return made


@dataclass(frozen=True)
class _ObjectContext:
    """A plain object.

    Args:
        kind: its class.
        names: of its attributes.
    """

    kind: type[Any]
    names: tuple[str, ...]

    def build(self, children: Sequence[Any]) -> Any:
        # Its work is already in the attributes, some of which a class may compute when they are set.
        made: Any = object.__new__(self.kind)
        made.__dict__.update(zip(self.names, children, strict=True))
        return made


@dataclass(frozen=True)
class _DistributionContext:
    """A distribution of torch, or what transforms one.

    Args:
        kind: its class.
        names: of its attributes.
        rows: the first size of each that is a tensor or a distribution.
    """

    kind: type[Any]
    names: tuple[str, ...]
    rows: tuple[int | None, ...]

    def build(self, children: Sequence[Any]) -> Any:
        """One of these attributes, whose tensors may have other rows than those that were described."""
        made: Any = object.__new__(self.kind)
        attributes = dict(zip(self.names, children, strict=True))
        shape: Sequence[int] = attributes.get("_batch_shape", ())
        rows = [(old, new) for old, new in zip(self.rows, map(_rows, children), strict=True) if new is not None]
        now = [new for old, new in rows if shape and old == shape[0]]
        if now:
            attributes["_batch_shape"] = torch.Size([now[0], *shape[1:]])
        made.__dict__.update(attributes)
        return made


def _rows(value: Any) -> int | None:
    distribution: Any = value if isinstance(value, Distribution) else None
    shape = getattr(value, "shape", ()) if distribution is None else distribution.batch_shape
    return shape[0] if shape else None


def _open_distribution(value: Any) -> tuple[Sequence[str], Sequence[Any], Any] | None:
    if not isinstance(value, Distribution | Transform):
        return None
    attributes: Mapping[str, Any] = vars(cast("object", value))
    names, children = tuple(attributes), tuple(attributes.values())
    return names, children, _DistributionContext(type(cast("object", value)), names, tuple(map(_rows, children)))


def holds_tensors(value: Any) -> bool:
    """Whether there are tensors in the attributes of an object, or in those of what it holds."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            return True
        if id(part) in seen or isinstance(part, (*_PLAIN, ModuleType)):  # a Python module leads to everything
            continue
        seen.add(id(part))
        waiting.extend(getattr(cast("object", part), "__dict__", {}).values())
        if isinstance(part, Mapping):
            waiting.extend(cast("Mapping[Any, Any]", part).values())
        elif isinstance(part, list | tuple | set):
            waiting.extend(cast("Iterable[Any]", part))
    return False


def move_leaves(structure: Structure, places: int) -> Structure:
    """The same structure of tensors that are so many places further back in the flat list."""
    if isinstance(structure, Leaf):
        return dataclasses.replace(structure, index=structure.index + places)
    if isinstance(structure, Branch):
        return Branch(structure.context, tuple(move_leaves(child, places) for child in structure.children))
    return structure


def carried(structure: Structure) -> list[int]:
    """The places of tensors in containers whose class says that they go from call to call (``is_carried``)."""
    if not isinstance(structure, Branch):
        return []
    if getattr(getattr(structure.context, "type", None), "is_carried", False):
        return [end.index for end in walk(structure) if isinstance(end, Leaf)]
    return [place for child in structure.children for place in carried(child)]


def _open_block_mask(value: Any) -> tuple[Sequence[str], Sequence[Any], Any] | None:
    opened = open_block_mask(value)
    if opened is None:
        return None
    captured, form = opened
    keys = (*(f"captured_{place}" for place in range(len(captured))), "mask_mod")
    return keys, (*captured, form), BlockMaskForm


def _open_dataclass(value: Any) -> tuple[Sequence[str], Sequence[Any], Any] | None:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    names = tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
    return names, [getattr(value, name) for name in names], _DataclassContext(type(value), names)


def is_cache(value: Any) -> bool:
    """Whether it is a cache of keys and values, which nothing carries from call to call."""
    return any(kind.__module__ == "transformers.cache_utils" for kind in type(value).__mro__)


def _open_object(value: Any) -> tuple[Sequence[str], Sequence[Any], Any] | None:
    """An object of a class of the user's own, if all that it holds are tensors and what can be compared, or a dict with
    a class of its own, without what else that holds (how a tokenizer came to the tensors).
    """
    if not holds_tensors(value):
        return None
    if UserDict in type(cast("object", value)).__mro__:
        given: Mapping[str, Any] = vars(cast("object", value))
        if not _can_be_compared(given["data"], (id(value),)):
            return None
        attributes = {name: x if _can_be_compared(x, (id(value),)) else None for name, x in given.items()}
    elif _is_plain_object(value, ()):
        attributes = vars(cast("object", value))
    else:
        return None
    names = tuple(attributes)
    return names, tuple(attributes.values()), _ObjectContext(type(cast("object", value)), names)


_OPENED = (tuple, list, dict)


def _is_plain_object(value: Any, inside: tuple[int, ...]) -> bool:
    kind: Any = type(cast("object", value))
    is_foreign = kind.__module__.partition(".")[0] in ("builtins", "torch", "numpy", "transformers") or callable(value)
    if is_foreign or id(value) in inside or getattr(kind, "__slots__", ()):
        return False
    if not hasattr(value, "__dict__"):
        return False
    return all(_can_be_compared(part, (*inside, id(value))) for part in vars(value).values())


def _can_be_compared(value: Any, inside: tuple[int, ...]) -> bool:
    """Whether it is a tensor, or two of them in two calls are equal if they are alike."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return True
    if type(value) in _OPENED:
        parts: Iterable[Any] = cast("Any", value.values() if isinstance(value, dict) else value)
        return all(_can_be_compared(part, inside) for part in parts)
    if holds_tensors(value):
        return _open_object(value) is not None if UserDict in type(value).__mro__ else _is_plain_object(value, inside)
    return type(value).__eq__ is not object.__eq__


def attributes_of_objects(value: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The plain objects in containers, each with the attributes that it has now."""
    if isinstance(value, (Tensor, *_PLAIN)):
        return []
    own = _open_object(value)
    opened = own or flatten_one_level(value)
    if opened is None:
        return []
    found: list[tuple[Any, dict[str, Any]]] = [] if own is None else [(value, {**vars(cast("object", value))})]
    return found + [each for part in opened[1] for each in attributes_of_objects(part)]


def changed_objects(given: Sequence[tuple[Any, Mapping[str, Any]]]) -> list[str]:
    """The classes of those objects whose attributes are others than they were."""
    return [type(owner).__name__ for owner, before in given if not _is_same(owner, before)]


def _is_same(owner: Any, before: Mapping[str, Any]) -> bool:
    now: Mapping[str, Any] = vars(cast("object", owner))
    return len(now) == len(before) and all(now.get(name) is x for name, x in before.items())
