"""Makes attributes of a copied module refer to parts of the copy instead of the original."""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

__all__ = ["cell_content", "redirect"]


def redirect(value: Any, ids: Mapping[int, Any]) -> Any:
    """Return `value` with references to objects replaced: an object x by ``ids[id(x)]``, if it is a key.

    It replaces them in lists, tuples, sets, dicts, bound methods, and the closures and defaults of functions, which are
    copied.
    """
    if id(value) in ids:
        return ids[id(value)]
    untyped: Any = value
    if type(value) in (list, tuple, set):
        return type(untyped)(redirect(item, ids) for item in untyped)
    if type(value) is dict:
        return {key: redirect(item, ids) for key, item in untyped.items()}
    if isinstance(value, MethodType) and id(value.__self__) in ids:
        return MethodType(value.__func__, ids[id(value.__self__)])
    return _redirect_function(value, ids) if isinstance(value, FunctionType) else value


def _redirect_function(function: FunctionType, ids: Mapping[int, Any]) -> FunctionType:
    """As `redirect`, for a function: ``lambda x: m.proj(m.fc(x))`` in a constructor refers to a submodule m."""
    cells = [(cell, cell_content(cell)) for cell in function.__closure__ or ()]
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if not any(id(x) in ids for x in (*(x for _, x in cells), *positional, *named.values())):
        return function
    closure = tuple(CellType(ids[id(x)]) if id(x) in ids else cell for cell, x in cells)
    defaults = tuple(ids.get(id(x), x) for x in positional)
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, closure or None)
    copy.__kwdefaults__ = {key: ids.get(id(x), x) for key, x in named.items()} or None
    copy.__dict__.update(function.__dict__)
    return copy


def cell_content(cell: CellType) -> Any:
    """What a function encloses there; None as long as it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # empty: assigned later
        return None
