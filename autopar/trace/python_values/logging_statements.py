"""Statements that only print, warn or log, so that a program without them computes the same."""

from __future__ import annotations

import ast
import builtins
import logging
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

__all__ = ["changes_nothing", "only_log"]

_PRINTING = (print, warnings.warn)
_LOGGING = ("debug", "info", "warning", "warning_once", "warn", "error", "exception", "critical", "log")
# What a message is made of: these change nothing, nor do methods of tensors whose names end in no underscore.
_MAKING = (str, int, float, bool, repr, len, round, sum, min, max, abs, list, tuple, sorted, format, type)
_CHANGING = ("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "share_memory")
_OF_TEXT = ("format", "join")


def only_log(statements: Sequence[ast.stmt], frame: FrameType) -> bool:
    """Whether all `statements` of the function that runs in `frame` only print, warn or log."""
    return all(isinstance(each, ast.Pass) or _is_message(each, frame) for each in statements)


def _is_message(statement: ast.stmt, frame: FrameType) -> bool:
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    call = statement.value
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return _logs(call.func, frame) and all(changes_nothing(each, frame) for each in arguments)


def _logs(function: ast.expr, frame: FrameType) -> bool:
    if any(_value(function, frame) is each for each in _PRINTING):
        return True
    if not isinstance(function, ast.Attribute) or function.attr not in _LOGGING:
        return False
    owner = _value(function.value, frame)
    return owner is logging or isinstance(owner, logging.Logger | logging.LoggerAdapter)


def changes_nothing(expression: ast.expr, frame: FrameType) -> bool:
    """Whether Python may leave out `expression` of the function that runs in `frame`: it only computes."""
    nodes = list(ast.walk(expression))
    if any(isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for node in nodes):
        return False
    return all(_makes_text(node.func, frame) for node in nodes if isinstance(node, ast.Call))


def _makes_text(function: ast.expr, frame: FrameType) -> bool:
    made = _value(function, frame)
    if any(made is each for each in _MAKING):
        return True
    if not isinstance(function, ast.Attribute):
        return False
    name, owner = function.attr, _value(function.value, frame)
    computes = hasattr(Tensor, name) and name not in _CHANGING and not name.endswith("_")
    if owner is None or isinstance(owner, str):
        return computes or name in _OF_TEXT
    return computes and (owner is torch or isinstance(owner, Tensor))


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """What a name, or attributes of one, stand for; None if that is not plain to see."""
    match expression:
        case ast.Name(name):
            scopes = (frame.f_locals, frame.f_globals, vars(builtins))
            return next((scope[name] for scope in scopes if name in scope), None)
        case ast.Attribute(value, name):
            return getattr(_value(value, frame), name, None)
        case _:
            return None
