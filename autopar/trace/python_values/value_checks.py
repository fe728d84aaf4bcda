"""Checks of values that do nothing but raise or log: ``if labels.max() >= size: raise ...``, ``assert (x > 0).all()``,
``if x.isnan().any(): logger.warning(...)``, and torch's own, ``torch._check(bool((x > 0).all()))`` and
``torch._assert_async``.

A traced program has no values to check, and takes the way on which nothing is raised or logged.  It also takes the
branches of `masked_writes` and `overflow_clamps`.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

from autopar.trace.compat import torch_recording
from autopar.trace.compat.source_lines import is_users, user_line
from autopar.trace.python_values.logging_statements import only_log
from autopar.trace.python_values.masked_writes import writes_where_asked
from autopar.trace.python_values.overflow_clamps import answer_to_clamp

__all__ = ["passed_checks"]

_CHECKING_CALLS = ("_assert", "_check")  # of torch: they raise where their first argument is false

Span = tuple[int | None, int | None, int | None, int | None]  # first line, last line, first column, last column


@contextmanager
def passed_checks(note: Callable[[str], None], answer: Callable[[Any], bool | None]) -> Generator[None]:
    """Inside, a truth value that only a check needs is the one with which nothing is raised or logged; `note` gets its
    text.  Of other numbers it is what `answer` says, if that is not None.
    """

    def left_out(where: str) -> None:
        note(
            f"{where}: this check of values is left out, as only the values of a batch decide it: check batches "
            "outside of the model"
        )

    def decide(frame: FrameType, values: tuple[Any, ...]) -> bool | None:
        check = _check_at(frame)
        if check is None:
            return answer(values[0]) if isinstance(values[0], torch.SymBool) else None
        if check.is_left_out:
            left_out(check.where)
        return check.answer

    def assert_async(*_: Any) -> None:
        left_out(user_line())

    with torch_recording.truth_values(decide), patch.object(torch, "_assert_async", assert_async):
        yield


@dataclass(frozen=True)
class _Check:
    """Where a check stands, the truth value with which it does nothing, and whether the user should know of it."""

    where: str
    answer: bool
    is_left_out: bool = True


def _check_at(frame: FrameType) -> _Check | None:
    """The check of the user's that `frame` is deciding; None if what is computed depends on it."""
    file = frame.f_code.co_filename
    if frame.f_code is torch_recording.ASSERT_CODE:
        return _Check(user_line(), True)
    if not is_users(file):
        return None
    span = list(frame.f_code.co_positions())[frame.f_lasti // 2]  # instructions take two bytes
    for node in ast.walk(_parsed(frame)):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _only_checks(node, span, frame)):
            answers = _answers(node, span)
            if len(answers) == 1:
                return _Check(f"{file}:{node.lineno}", answers.pop())
        elif isinstance(node, ast.If) and _is_asked(node, span) and writes_where_asked(node, frame):
            return _Check(f"{file}:{node.lineno}", True, is_left_out=False)
        elif isinstance(node, ast.If) and _is_asked(node, span) and (taken := answer_to_clamp(node, frame)) is not None:
            return _Check(f"{file}:{node.lineno}", taken, is_left_out=False)
        elif isinstance(node, ast.Call) and _is_checking(node) and _holds(node.args[0], span):
            return _Check(f"{file}:{node.lineno}", True)
    return None


def _only_checks(branch: ast.If, span: Span, frame: FrameType) -> bool:
    if isinstance(branch.body[-1], ast.Raise):
        return True
    return _is_asked(branch, span) and not branch.orelse and only_log(branch.body, frame)


def _is_asked(branch: ast.If, span: Span) -> bool:
    return _holds(branch.test, span) or span == _span(branch)


def _is_checking(call: ast.Call) -> bool:
    """Whether this is ``torch._check(bool(...), ...)`` or the like."""
    match call:
        case ast.Call(ast.Attribute(ast.Name("torch"), name), [ast.Call(ast.Name("bool")), *_]):
            return name in _CHECKING_CALLS
        case _:
            return False


def _answers(check: ast.If | ast.Assert, span: Span) -> set[bool]:
    """The truth values with which `check` raises nothing, of those of its parts that the instruction at `span` may ask.

    Before Python 3.12 the span is that of the whole statement.
    """
    parts = [*_parts(check.test, isinstance(check, ast.Assert))]
    if span == _span(check):
        return {answer for _, answer in parts}
    return {answer for part, answer in parts if _holds(part, span)}


def _span(node: ast.stmt) -> Span:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _parsed(frame: FrameType) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except SyntaxError:  # no file of Python
        return ast.Module([], [])


def _holds(node: ast.expr, span: Span) -> bool:
    line, end_line, column, end_column = span
    if line is None or end_line is None or column is None or end_column is None:
        return False
    if node.end_lineno is None or node.end_col_offset is None:
        return False
    begins = (node.lineno, node.col_offset) <= (line, column)
    return begins and (end_line, end_column) <= (node.end_lineno, node.end_col_offset)


def _parts(test: ast.expr, answer: bool) -> Iterator[tuple[ast.expr, bool]]:
    """The parts of a test that Python asks for their truth, with the value that makes the test `answer`."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value, answer)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not answer)
    else:
        yield test, answer
