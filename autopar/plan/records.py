"""Converts frozen dataclasses to JSON that people can read and edit, and back.

Nested dataclasses become objects, layouts and assignments text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, get_args, get_type_hints

from autopar.placement import Layout, format_layout, parse_layout
from autopar.user_text.json_reading import check_fields

__all__ = ["decode_record", "encode_record"]

Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # from JSON, and to JSON


def encode_record(record: Any) -> dict[str, Any]:
    """Convert a record (a frozen dataclass) to a dict for `json.dumps`."""
    return {name: encode(getattr(record, name)) for name, (_, encode) in _codecs(record.__class__).items()}


def decode_record(kind: type[Any], data: Any, where: str) -> Any:
    """Convert what `encode_record` returned back to a record of type `kind`; messages call it `where`.

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
    """The codec of a field with this type hint: an entry of `_CODECS`, a record, or a tuple of records."""
    if hint in _CODECS:
        return _CODECS[hint]
    kind: Any = hint if is_dataclass(hint) else get_args(hint)[0]
    if kind is hint:
        return lambda value: decode_record(kind, value, name), encode_record
    return (
        lambda value: tuple(decode_record(kind, item, f"{name}[{index}]") for index, item in enumerate(value)),
        lambda value: list(map(encode_record, value)),
    )
