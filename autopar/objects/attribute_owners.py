"""What has attributes that a forward reads and a script may set: modules, and records such as their configs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch import nn

__all__ = ["attribute_owners", "attributes_of", "is_plain", "is_record", "joined", "own_records"]

_PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype})  # compared, and never written to
_DEEPEST = 3  # a config of configs, such as those of text and images, with one more level; objects may have circles
_IN_RECORDS = (
    list, tuple, dict, set, frozenset, torch.device, torch.Tensor, FunctionType, BuiltinFunctionType,
)  # fmt: skip


def attribute_owners(root: nn.Module) -> dict[str, object]:
    """Path -> module, and then path -> record, of `root` and all that it has; each under the first of its paths.

    A record is an object with attributes that are plain values, containers, tensors, functions and other records only,
    as configs are.
    """
    owners: dict[str, object] = dict(cast("Iterable[tuple[str, nn.Module]]", nn.Module.named_modules(root)))
    seen: set[int] = set()
    for path, module in list(owners.items()):
        for name, value in vars(module).items():
            owners.update(_records(joined(path, name), value, seen))
    return owners


def attributes_of(root: nn.Module, path: str) -> dict[str, Any]:
    """Those of what `root` has at a path of `attribute_owners` now; none where nothing is."""
    owner: object = root
    for name in path.split(".") if path else ():
        own = vars(owner)
        modules = own.get("_modules", {})
        owner = modules[name] if name in modules else own.get(name)
        if not hasattr(owner, "__dict__"):
            return {}
    return vars(owner)


def own_records(copied: nn.Module, original: nn.Module) -> None:
    """Give a copy of a model its own records in place of those that it shares, as they copy as themselves."""
    shared = {id(x): x for x in attribute_owners(original).values() if not isinstance(x, nn.Module)}
    made: dict[int, object] = {}
    pending: list[object] = list(nn.Module.modules(copied))
    while pending:
        own = vars(pending.pop())
        for name, value in own.items():
            if id(value) in shared:
                if id(value) not in made:
                    made[id(value)] = copy.copy(value)
                    pending.append(made[id(value)])
                own[name] = made[id(value)]


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a flag, text, a dtype or a member of an enumeration, or a tuple of these."""
    if type(value) is tuple:
        return all(map(is_plain, cast("tuple[Any, ...]", value)))
    return type(value) in _PLAIN or isinstance(value, Enum)


def joined(path: str, name: str) -> str:
    """The path of an attribute."""
    return f"{path}.{name}" if path else name


def _records(path: str, value: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    if id(value) in seen or not is_record(value):
        return
    seen.add(id(value))
    yield path, value
    for name, inner in vars(value).items():
        yield from _records(joined(path, name), inner, seen)


def is_record(value: object, depth: int = 1) -> bool:
    """Whether a value is a record (`attribute_owners`)."""
    if isinstance(value, type | nn.Module | torch.Tensor | Enum) or callable(value):
        return False
    if not getattr(value, "__dict__", None):
        return False
    return depth <= _DEEPEST and all(
        is_plain(x) or isinstance(x, _IN_RECORDS) or is_record(x, depth + 1) for x in vars(value).values()
    )
