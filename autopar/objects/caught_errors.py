"""Errors of autopar that a script's ``except`` clauses take for what caused them."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

__all__ = ["also_caught_as"]

E = TypeVar("E", bound=Exception)

_BUILTIN = frozenset({
    RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, LookupError, IndexError, KeyError,
    ArithmeticError, FloatingPointError, ZeroDivisionError, OverflowError, AssertionError,
})  # fmt: skip


def also_caught_as(kind: type[E], cause: BaseException) -> type[E]:
    """`kind`, of whose errors ``except`` clauses for what `cause` is take care, too.

    A loop that skips a batch with ``except (RuntimeError, IndexError): continue`` so does that on every rank: on the
    one whose rows failed, and on those that hear of it.
    """
    base = next((each for each in type(cause).__mro__ if each in _BUILTIN), kind)
    return kind if issubclass(kind, base) else _joined(kind, base)


@cache
def _joined(kind: type[Any], base: type[BaseException]) -> type[Any]:
    def reduce(error: Exception) -> tuple[Any, ...]:
        return _rebuilt, (kind, base, error.args), vars(error)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    text = {"__str__": Exception.__str__}  # that of a KeyError is quoted
    return type(kind.__name__, (kind, base), {**names, **text, "__reduce__": reduce})


def _rebuilt(kind: type[Any], base: type[BaseException], args: tuple[Any, ...]) -> Any:
    """One that was pickled, as ranks tell each other of errors."""
    return _joined(kind, base)(*args)
