"""Numbers that Python makes of tensors by a call, ``int(labels.max())`` and ``float(loss)``.

``x.item()`` gives a trace a number that stays unknown: it may be stored, formatted and checked, and is refused where
something is computed from it.  ``int`` and ``float`` can't give such a number, as Python wants a real one of them.  So
a trace that ends at such a call is tried again with other functions under these names in the module that made it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import builtins
import linecache
import math
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from autopar.trace.compat import torch_recording
from autopar.trace.compat.source_lines import is_users

__all__ = ["Names", "noted_conversions", "unknown_numbers"]

Names = dict[str, Any]
"""The global names of a module."""

# An ``int`` of a module that is another class than Python's would answer these otherwise.
_COMPARES_TYPES = re.compile(r"\bis (not )?(int|float)\b")
_QUESTIONS = {"isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite}  # of `math`, and of torch


@contextmanager
def noted_conversions(note: Callable[[Names], None]) -> Generator[None]:
    """Inside, `note` gets the names of each module of the user's that asks for the number of a tensor by a call."""

    def noting(convert: Callable[[Any], Any], is_unknown: Callable[[Any], bool]) -> Callable[[Any], Any]:
        def converted(x: Any) -> Any:
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            if is_unknown(x) and _can_be_renamed(frame):
                note(frame.f_globals)
            return convert(x)

        return converted

    base: Any = torch.Tensor
    symbolic: Any = torch.SymFloat
    with ExitStack() as patches:
        for name in ("__int__", "__float__"):
            patches.enter_context(patch.object(Tensor, name, noting(getattr(base, name), _is_unknown)))
        patches.enter_context(
            patch.object(symbolic, "__float__", noting(symbolic.__float__, lambda x: not x.node.has_hint()))
        )
        yield


@contextmanager
def unknown_numbers(modules: Sequence[Names]) -> Generator[None]:
    """Inside, calls of ``int``, ``float``, ``math.isnan`` and the like in these `modules` give unknown numbers as
    numbers that stay unknown.
    """
    plain = {name: getattr(math, name) for name in _QUESTIONS}
    questions = {name: _asking(name) for name in _QUESTIONS}
    renamed: dict[str, Any] = {"int": _Int, "float": _Float}
    with ExitStack() as patches:
        for name, question in questions.items():
            patches.enter_context(patch.object(math, name, question))
        for names in modules:
            own = {name: new for name, new in renamed.items() if name not in names}
            imported = {name: questions[name] for name in questions if names.get(name) is plain[name]}
            patches.enter_context(patch.dict(names, {**own, **imported}))
        yield


def _can_be_renamed(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_users(file) and not _COMPARES_TYPES.search("".join(linecache.getlines(file, frame.f_globals)))


def _is_unknown(x: object) -> bool:
    recorder = torch_recording.recorder()
    return isinstance(x, Tensor) and recorder is not None and recorder.node_of(x) is not None


def _asking(name: str) -> Callable[[Any], Any]:
    plain = getattr(math, name)

    def question(x: Any) -> Any:
        if isinstance(x, torch.SymInt):
            return name == "isfinite"
        if isinstance(x, torch.SymFloat):
            x = torch.scalar_tensor(cast("Any", x))
        return _QUESTIONS[name](x).long().item() != 0 if _is_unknown(x) else plain(x)

    return question


class _Builtin(type):
    """Of a class that is taken for the builtin one which it is made of."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cast("type", cls.__base__))

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


class _Int(int, metaclass=_Builtin):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and _is_unknown(args[0]):
            return args[0].long().item()
        if args and isinstance(args[0], torch.SymInt | torch.SymFloat):
            return torch.sym_int(args[0])
        return builtins.int(*args, **kwargs)


class _Float(float, metaclass=_Builtin):
    def __new__(cls, *args: Any) -> Any:
        if args and _is_unknown(args[0]):
            return args[0].double().item()
        if args and isinstance(args[0], torch.SymInt | torch.SymFloat):
            return torch.sym_float(args[0])
        return builtins.float(*args)
