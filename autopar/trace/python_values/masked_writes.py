"""Branches that only write where a mask is true, and ask first whether it is anywhere: ``if mask.any(): x[mask] = 0``.

With a mask that is false everywhere these statements write nothing, so a program takes the branch in every call.
"""

from __future__ import annotations

import ast
from types import FrameType

import torch
from torch import Tensor

from autopar.trace.python_values.logging_statements import changes_nothing

__all__ = ["writes_where_asked"]


def writes_where_asked(branch: ast.If, frame: FrameType) -> bool:
    """Whether `branch`, in the function that runs in `frame`, asks for nothing but whether a mask is true anywhere, and
    its statements compute the same without the question.
    """
    mask = _asked_mask(branch.test)
    known = frame.f_locals.get(mask)
    is_mask = isinstance(known, Tensor) and known.dtype == torch.bool
    return is_mask and not branch.orelse and all(_writes_where(each, mask, frame) for each in branch.body)


def _asked_mask(test: ast.expr) -> str:
    """The name of the mask in ``mask.any()`` or ``torch.any(mask)``; otherwise empty."""
    match test:
        case ast.Call(ast.Attribute(ast.Name("torch"), "any"), [ast.Name(mask)], []):
            return mask
        case ast.Call(ast.Attribute(ast.Name(mask), "any"), [], []):
            return mask
        case _:
            return ""


def _writes_where(statement: ast.stmt, mask: str, frame: FrameType) -> bool:
    match statement:
        case ast.Assign([ast.Subscript(written, ast.Name(name))], value) if name == mask:
            return mask not in _names(written) and changes_nothing(value, frame)
        case ast.Assign([ast.Name(written)], ast.Call(ast.Attribute(ast.Name(read), "masked_fill"), arguments, [])):
            is_same = written == read != mask
        case ast.Expr(ast.Call(ast.Attribute(written, "masked_fill_"), arguments, [])):
            is_same = mask not in _names(written) and changes_nothing(written, frame)
        case _:
            return False
    where = arguments[0] if len(arguments) == 2 else None
    return is_same and isinstance(where, ast.Name) and where.id == mask and changes_nothing(arguments[1], frame)


def _names(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
