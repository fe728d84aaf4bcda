"""Reads JSON that may be edited, malicious or damaged: plans, profiles, clusters and configs.

For any text, `read_json` and `check_fields` raise only ValueError.  The caller, which knows the file, turns it into an
error that says what to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, cast

__all__ = ["check_fields", "read_json"]

_LIMIT = 2**63
"""Whole numbers must be below this: larger ones don't fit a tensor's sizes, and sums of floats overflow on them."""


def read_json(text: str) -> Any:
    """Parse `text`, in which numbers may be ``Infinity``, as `json.dumps` writes it.

    Raises:
        ValueError: it isn't JSON, is nested too deeply, or has a number that arithmetic can't handle (NaN, 2**63 or
            more), or half of a surrogate pair, which can't be written.
    """
    try:
        data = json.loads(text, parse_int=_read_int, parse_float=_read_float, parse_constant=_read_constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} column {error.colno}: {error.msg}") from error
    return data


def _read_int(text: str) -> int:
    number = int(text) if len(text) < 20 else _LIMIT  # Python itself refuses to read more than 4,300 digits
    if not -_LIMIT < number < _LIMIT:
        raise ValueError(f"the number {text[:20]}{'...' * (len(text) > 20)} is too large")
    return number


def _read_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:20]}{'...' * (len(text) > 20)} is too large")
    return number


def _read_constant(text: str) -> float:
    if text != "Infinity":
        raise ValueError(f"{text} is not a usable number")
    return math.inf


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, cast("list[Any]", value)))


def _is_dict_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_item, cast("dict[str, Any]", value).values()))


# Type of a field -> a description of its JSON, and a check of it.
_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", _is(int)),
    "float": ("a number", _is(int, float)),
    "str": ("a text", _is(str)),
    "tuple[int, ...]": ("a list of whole numbers", _is_list_of(_is(int))),
    "tuple[str, ...]": ("a list of texts", _is_list_of(_is(str))),
    "tuple[Layout, ...]": ("a list of layouts such as 'S(0),R'", _is_list_of(_is(str))),
    "tuple[Point, ...]": ("a list of lists of numbers", _is_list_of(_is_list_of(_is(int, float)))),
    "tuple[Reading, ...]": ("a list of lists of numbers", _is_list_of(_is_list_of(_is(int, float)))),
    "tuple[tuple[str, ...], ...]": ("a list of texts such as 'b -'", _is_list_of(_is(str))),
    "tuple[tuple[str, Layout], ...]": ("an object of layouts such as 'S(0),R'", _is_dict_of(_is(str))),
    "tuple[tuple[str, float], ...]": ("an object of numbers", _is_dict_of(_is(int, float))),
    "tuple[tuple[str, int], ...]": ("an object of whole numbers", _is_dict_of(_is(int))),
    "Mapping[str, float]": ("an object of numbers", _is_dict_of(_is(int, float))),
    "Mapping[str, str]": ("an object of texts", _is_dict_of(_is(str))),
}
_OBJECT = ("an object", _is(dict))
_LIST_OF_OBJECTS = ("a list of objects", _is_list_of(_is(dict)))
_OBJECT_OF_OBJECTS = ("an object of objects", _is_dict_of(_is(dict)))


def check_fields(kind: type[Any], data: Any, where: str, *, is_whole: bool = True) -> None:
    """Check that `data` is an object with the fields of the dataclass `kind`, with values of the right form.

    Args:
        kind: its fields may be numbers, texts, other dataclasses, and tuples and mappings of these.
        data: from `read_json`.
        where: its place in the file, for messages.
        is_whole: whether fields with defaults are required too.

    Raises:
        ValueError: fields are missing or unknown, or one has the wrong form.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, but is {data!r:.80}")
    values = cast("dict[str, Any]", data)
    known = {field.name: field for field in fields(kind) if field.init}
    required = [name for name, field in known.items() if is_whole or field.default is field.default_factory is MISSING]
    missing, unknown = sorted({*required} - values.keys()), sorted(values.keys() - known.keys())
    if missing or unknown:
        raise ValueError(f"{where}: fields missing: {missing}, unknown: {unknown!s:.200}")
    for name, value in values.items():
        form, fits = _form_of(str(known[name].type))
        if not fits(value):
            raise ValueError(f"{where}: {name!r} must be {form}, but is {value!r:.80}")


def _form_of(type_name: str) -> tuple[str, Callable[[Any], bool]]:
    if type_name in _FORMS:
        return _FORMS[type_name]
    if type_name.startswith("tuple["):
        return _LIST_OF_OBJECTS
    return _OBJECT_OF_OBJECTS if type_name.startswith("Mapping[") else _OBJECT
