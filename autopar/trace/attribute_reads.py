"""Which attributes a forward reads of its modules and their configs: numbers, flags, text, containers, functions and
tensors that a script may set later, or write to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from autopar.objects.attribute_contents import is_compared
from autopar.objects.attribute_owners import attribute_owners, is_plain

__all__ = ["recorded_reads"]


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
        if id(self) in paths and not name.startswith("__") and (is_plain(value) or is_compared(value)):
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
