"""Makes attributes of a copied module refer to parts of the copy instead of the original."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

__all__ = ["cell_content", "redirect", "refers"]

_CONTAINERS = (list, tuple, set, dict)


def redirect(value: Any, ids: Mapping[int, Any]) -> Any:
    """Return `value` with references to objects replaced: an object x by ``ids[id(x)]``, if it is a key.

    It replaces them in lists, tuples, sets, dicts, bound methods, ``functools.partial``, and the closures and defaults
    of functions, which are copied.  A closure may refer to one through another function, such as a ``forward`` that is
    wrapped by the one that takes its place.
    """
    return _Redirection(ids).of(value)


def refers(value: Any, ids: Container[int]) -> bool:
    """Whether there is something in `value` that `redirect` replaces."""
    return _refers(value, ids, set(), in_containers=True)


class _Redirection:
    """One call of `redirect`: functions that refer to each other do so when they are copied, and share their cells."""

    def __init__(self, ids: Mapping[int, Any]) -> None:
        self._ids = ids
        self._functions: dict[int, FunctionType] = {}
        self._cells: dict[int, CellType] = {}

    def of(self, value: Any) -> Any:
        untyped: Any = value
        if id(value) in self._ids or type(value) not in _CONTAINERS:
            return self._part(value)
        if type(value) is dict:
            return {key: self.of(item) for key, item in untyped.items()}
        return type(untyped)(self.of(item) for item in untyped)

    def _part(self, value: Any) -> Any:
        """The same where lists and dicts stay: of a closure they are its own memory."""
        if not _refers(value, self._ids, set()):
            return value
        if id(value) in self._ids:
            return self._ids[id(value)]
        if isinstance(value, MethodType):
            return MethodType(self._part(value.__func__), self._part(value.__self__))
        if isinstance(value, FunctionType):
            return self._functions.get(id(value)) or self._copy(value)
        function, *args = map(self._part, _parts(value))
        names = [*value.keywords]
        count = len(args) - len(names)
        return partial(function, *args[:count], **dict(zip(names, args[count:], strict=True)))

    def _copy(self, function: FunctionType) -> FunctionType:
        cells = function.__closure__ or ()
        new = [cell for cell in cells if id(cell) not in self._cells and _refers(cell_content(cell), self._ids, set())]
        self._cells.update((id(cell), CellType()) for cell in new)
        closure = tuple(self._cells.get(id(cell), cell) for cell in cells)
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, closure or None)
        self._functions[id(function)] = made  # before its cells are filled: it may enclose itself
        for cell in new:
            self._cells[id(cell)].cell_contents = self._part(cell_content(cell))
        made.__defaults__ = tuple(map(self._part, function.__defaults__ or ())) or None
        made.__kwdefaults__ = {key: self._part(x) for key, x in (function.__kwdefaults__ or {}).items()} or None
        made.__dict__.update(function.__dict__)
        return made


def _refers(value: Any, ids: Container[int], seen: set[int], *, in_containers: bool = False) -> bool:
    if id(value) in ids:
        return True
    is_container = in_containers and type(value) in _CONTAINERS
    if id(value) in seen or not (is_container or _is_function(value)):
        return False
    seen.add(id(value))
    untyped: Any = value
    items: Iterable[Any] = untyped.values() if type(value) is dict else untyped
    parts = items if is_container else _parts(value)
    return any(_refers(part, ids, seen, in_containers=is_container) for part in parts)


def _is_function(value: object) -> bool:
    return isinstance(value, FunctionType | MethodType | partial)


def _parts(value: Any) -> tuple[Any, ...]:
    """What a function, a bound method or a partial refers to."""
    if type(value) is MethodType:
        return value.__func__, value.__self__
    if type(value) is not FunctionType:
        return value.func, *value.args, *value.keywords.values()
    enclosed = map(cell_content, value.__closure__ or ())
    return *enclosed, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()


def cell_content(cell: CellType) -> Any:
    """What a function encloses there; None as long as it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # empty: assigned later
        return None
