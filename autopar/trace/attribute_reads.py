"""Which attributes a forward reads of its modules and their configs: numbers, flags, text and tensors that a script may
set later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from autopar.attribute_owners import attribute_owners

__all__ = ["recorded_reads"]

_KINDS = frozenset({bool, int, float, complex, str, type(None), torch.dtype, tuple, Tensor})


@contextmanager
def recorded_reads(model: nn.Module) -> Generator[set[tuple[str, str]]]:
    """Inside, what is read of `model`, its submodules and records that is neither a parameter nor a buffer, nor an
    object.

    The set that it gives has (path of the owner, attribute) when the context has ended.
    """
    owners = attribute_owners(model)
    paths = {id(owner): path for path, owner in owners.items()}
    reads: set[tuple[str, str]] = set()
    with ExitStack() as stack:
        records: set[type] = {type(x) for x in owners.values() if not isinstance(x, nn.Module)}
        for each in (nn.Module, *records):
            stack.enter_context(_reads_of(each, owners, paths, reads))
        yield reads


@contextmanager
def _reads_of(
    owner: type, owners: Mapping[str, object], paths: Mapping[int, str], reads: set[tuple[str, str]]
) -> Generator[None]:
    """Inside, reads of a class of owners are recorded."""
    untyped: Any = owner
    before: Callable[[Any, str], Any] = untyped.__getattribute__
    own = vars(owner).get("__getattribute__")

    def read(self: Any, name: str) -> Any:
        value = before(self, name)
        if (type(value) in _KINDS or isinstance(value, Enum)) and id(self) in paths:
            reads.update((paths[id(self)], each) for each in _names(self, name, value))
        return value

    try:
        untyped.__getattribute__ = read
    except TypeError:  # of a class that is written in C: all its objects may be read
        reads.update((path, name) for path, x in owners.items() if type(x) is owner for name in vars(x))
        yield
        return
    try:
        yield
    finally:
        if own is None:
            del untyped.__getattribute__
        else:
            untyped.__getattribute__ = own


def _names(owner: object, name: str, value: Any) -> tuple[str, ...]:
    """The attributes of an owner that were read by this name, with this result."""
    own = vars(owner)
    if name in own or isinstance(owner, nn.Module):
        return (name,) if name in own else ()
    # Configs have further names for some: it may be any that has this value.
    return tuple(each for each, x in own.items() if x is value)
