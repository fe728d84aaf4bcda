"""Results that functions keep from call to call (``functools.lru_cache``): tensors of a trace don't stay there.

A forward may make a table by such a function, ``positions(height, width, device)``.  A trace computes with tensors that
have no values, and they would be what the function returns ever after, in the next trace and in the user's own calls.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from autopar.objects.references import cell_content
from autopar.trace.calls.structure import holds_tensors

__all__ = ["FunctionCaches"]

_Cached = type(functools.lru_cache(len))
_KNOWN: weakref.WeakSet[Any] = weakref.WeakSet()  # in what has been looked through
_LOOKED_THROUGH: dict[str, tuple[int, int]] = {}  # name of a module -> which namespace it had, and of how many names
# What traces are made with caches no tensors of one for the model.  PyTorch's caches of symbolic shapes keep the whole
# environment of a trace, all of which would be looked through after each call.
_TRACING = frozenset({"autopar", "mpmath", "sympy", "torch"})


class FunctionCaches:
    """The functions with a cache in modules and their classes, also where another decorator encloses one.

    PyTorch's are left out.  The garbage collector would list them all, but not after ``gc.freeze()``, which scripts
    call before they train.
    """

    def __init__(self) -> None:
        _KNOWN.update(_cached_among(_new_names()))
        self._functions = [*_KNOWN]

    @contextmanager
    def left_without_tensors(self) -> Generator[None]:
        """At the end, functions that were called with new arguments inside forget what they keep if it has tensors."""
        before = [function.cache_info().misses for function in self._functions]
        try:
            yield
        finally:
            for function, misses in zip(self._functions, before, strict=True):
                if function.cache_info().misses != misses and holds_tensors(_kept(function)):
                    function.cache_clear()


def _new_names() -> Iterator[Mapping[str, Any]]:
    """Of modules that have come, or got names, since the last time, which takes a tenth of a second for all; and of
    the script, which may define a function anew.
    """
    for name, module in [*sys.modules.items()]:
        if _is_tracing(name) or type(getattr(module, "__dict__", None)) is not dict:  # one of another kind may act
            continue
        names: Mapping[str, Any] = vars(module)
        if name == "__main__" or _LOOKED_THROUGH.get(name) != (id(names), len(names)):
            _LOOKED_THROUGH[name] = id(names), len(names)
            yield names


def _cached_among(names: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    classes: dict[int, Mapping[str, Any]] = {}
    for each in names:
        for value in [*each.values()]:
            if issubclass(type(value), type):  # isinstance would ask the value, and load modules that load lazily
                classes[id(value)] = vars(value)
            else:
                yield from _cached_in(value)
    for each in classes.values():
        for value in [*each.values()]:
            yield from _cached_in(value)


def _cached_in(value: Any) -> Iterator[Any]:
    """The function itself, or those that a decorator of it encloses."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    cells = value.__closure__ if type(value) is FunctionType else None
    found = [value] if cells is None else [*map(cell_content, cells)]
    yield from (each for each in found if type(each) is _Cached and not _is_tracing(each.__module__))


def _is_tracing(name: str | None) -> bool:
    return (name or "").partition(".")[0] in _TRACING


def _kept(function: Any) -> list[Any]:
    """What a function keeps: without a limit in a dict, else each result by itself."""
    return [each for each in gc.get_referents(function) if not callable(each)]
