"""What attributes of a copied module refer to: the copy's parts in place of the original's."""

from __future__ import annotations

from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

__all__ = ["redirect"]


def redirect(value: Any, ids: Mapping[int, Any]) -> Any:
    """`value` itself, or its like that refers to other objects: those that `ids` has for theirs.

    Looks into lists, tuples, sets, dicts, bound methods, and the closures and defaults of functions.
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
    """`function`, or its like: ``lambda x: m.proj(m.fc(x))`` in a constructor holds the submodule m of the original."""
    cells = [(cell, _content(cell)) for cell in function.__closure__ or ()]
    positional, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    if not any(id(x) in ids for x in (*(x for _, x in cells), *positional, *named.values())):
        return function
    closure = tuple(CellType(ids[id(x)]) if id(x) in ids else cell for cell, x in cells)
    defaults = tuple(ids.get(id(x), x) for x in positional)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults or None, closure or None)
    made.__kwdefaults__ = {key: ids.get(id(x), x) for key, x in named.items()} or None
    made.__dict__.update(function.__dict__)
    return made


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: assigned later
        return None
