"""Which attributes a forward reads of its modules and their configs: numbers, flags, text, containers, functions and
tensors that a script may set later, or write to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autopar.objects.attribute_contents import is_compared
from autopar.objects.attribute_owners import attribute_owners, is_plain

__all__ = ["Reads", "recorded_reads"]

_NOBODY: tuple[str, Mapping[str, Any]] = ("", {})


@dataclass
class Reads:
    """Attributes that a forward reads and has not set before: (path of the owner, attribute).

    Attributes:
        found: those with a value.
        missing: those that were not there.
        is_paused: whether reads are not the forward's.
    """

    found: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    missing: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    is_paused: bool = False


@contextmanager
def recorded_reads(model: nn.Module) -> Generator[Reads]:
    """Inside, what is read of `model`, its submodules and records that is neither a parameter nor a buffer, nor an
    object, nor what was set inside.
    """
    owners = attribute_owners(model)
    before = {id(owner): (path, dict(vars(owner))) for path, owner in owners.items()}
    reads = Reads()
    with ExitStack() as stack:
        records: set[type] = {type(x) for x in owners.values() if not isinstance(x, nn.Module)}
        for each in (nn.Module, *records):
            stack.enter_context(_reads_of(each, owners, before, reads))
        for each in {type(x) for x in owners.values() if isinstance(x, nn.Module) and _hashes_itself(x)}:
            stack.enter_context(_unread_hash(each, reads))
        yield reads


def _hashes_itself(module: nn.Module) -> bool:
    return type(module).__hash__ is not object.__hash__


@contextmanager
def _unread_hash(owner: type, reads: Reads) -> Generator[None]:
    """Inside, what an owner reads for its hash is not recorded: walks over modules ask for it, not the forward."""
    untyped: Any = owner
    before: Callable[[Any], int] = untyped.__hash__
    is_own = "__hash__" in vars(owner)

    def hashed(self: Any) -> int:
        reads.is_paused, was_paused = True, reads.is_paused
        try:
            return before(self)
        finally:
            reads.is_paused = was_paused

    untyped.__hash__ = hashed
    try:
        yield
    finally:
        if is_own:
            untyped.__hash__ = before
        else:
            del untyped.__hash__


@contextmanager
def _reads_of(
    owner: type, owners: Mapping[str, object], owned: Mapping[int, tuple[str, Mapping[str, Any]]], reads: Reads
) -> Generator[None]:
    """Inside, reads of a class of owners are recorded."""
    untyped: Any = owner
    before: Callable[[Any, str], Any] = untyped.__getattribute__
    own = vars(owner).get("__getattribute__")
    is_module = issubclass(owner, nn.Module)
    known: dict[str, set[str]] = {}  # by path, its attributes among `reads`: most reads are of these

    def read(self: Any, name: str) -> Any:
        path, first = owned.get(id(self), _NOBODY)
        try:
            value = before(self, name)
        except AttributeError:  # of parameters, buffers and submodules as well, which are looked for elsewhere then
            if first:
                reads.missing.add((path, name))
            raise
        if not first or reads.is_paused or name.startswith("__") or name in known.setdefault(path, set()):
            return value
        attributes = before(self, "__dict__")
        if is_module and name not in attributes:  # methods
            return value
        if name in attributes and first.get(name) is not value:  # set since
            return value
        if is_plain(value) or is_compared(value):
            reads.found.update((path, each) for each in _names(attributes, name, value))
            known[path].update((name,) if name in attributes else ())
        return value

    try:
        untyped.__getattribute__ = read
    except TypeError:  # of a class that is written in C: all its objects may be read
        reads.found.update((path, name) for path, x in owners.items() if type(x) is owner for name in vars(x))
        yield
        return
    try:
        yield
    finally:
        if own is None:
            del untyped.__getattribute__
        else:
            untyped.__getattribute__ = own


def _names(attributes: Mapping[str, Any], name: str, value: Any) -> tuple[str, ...]:
    """Those of the attributes of an owner that were read by this name, with this result."""
    if name in attributes:
        return (name,)
    # Configs have further names for some: it may be any that has this value.
    return tuple(each for each, x in attributes.items() if x is value)
