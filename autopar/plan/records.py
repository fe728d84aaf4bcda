"""Frozen dataclasses as JSON that people read and edit, and back: nested records, layouts and assignments as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_type_hints

from autopar.json_reading import check_fields
from autopar.placement import Layout, format_layout, parse_layout

__all__ = ["decode_record", "encode_record"]

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # from JSON, and to it


def encode_record(record: Any) -> dict[str, Any]:
    """What `json.dumps` takes."""
    return {name: encode(getattr(record, name)) for name, (_, encode) in _codecs(record.__class__).items()}


def decode_record(kind: type[Any], data: Any, where: str) -> Any:
    """The record of this `kind` that `encode_record` made `data` of; `where` says in messages what it is.

    Raises:
        ValueError: a field is missing, unknown or of the wrong form.
    """
    check_fields(kind, data, where)
    return kind(**{name: decode(data[name]) for name, (decode, _) in _codecs(kind).items()})


@lru_cache
def _codecs(kind: type[Any]) -> dict[str, Codec]:
    return {name: _codec(hint, name) for name, hint in get_type_hints(kind).items()}


def _same(value: Any) -> Any:
    return value


_CODECS: dict[Any, Codec] = {
    int: (_same, _same),
    float: (_same, _same),
    str: (_same, _same),
    bool: (_same, _same),
    tuple[int, ...]: (tuple, list),
    tuple[str, ...]: (tuple, list),
    tuple[Layout, ...]: (
        lambda value: tuple(map(parse_layout, value)),
        lambda value: list(map(format_layout, value)),
    ),
    tuple[tuple[str, ...], ...]: (
        lambda value: tuple(tuple(text.split()) for text in value),
        lambda value: list(map(" ".join, value)),
    ),
    tuple[tuple[str, Layout], ...]: (
        lambda value: tuple((name, parse_layout(text)) for name, text in value.items()),
        lambda value: {name: format_layout(layout) for name, layout in value},
    ),
    tuple[tuple[str, float], ...]: (lambda value: tuple(value.items()), dict),
    tuple[tuple[str, int], ...]: (lambda value: tuple(value.items()), dict),
}


def _codec(hint: Any, name: str) -> Codec:
    """Of what stands in `_CODECS`, of a record, or of a tuple of records."""
    if hint in _CODECS:
        return _CODECS[hint]
    kind: Any = hint if is_dataclass(hint) else get_args(hint)[0]
    if kind is hint:
        return lambda value: decode_record(kind, value, name), encode_record
    return (
        lambda value: tuple(decode_record(kind, item, f"{name}[{index}]") for index, item in enumerate(value)),
        lambda value: list(map(encode_record, value)),
    )
