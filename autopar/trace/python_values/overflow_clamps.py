"""Branches that clamp a tensor only if it overflowed: ``if not x.isfinite().all(): x = torch.clamp(x, min=-c, max=c)``.

With bounds that every finite number keeps, a clamp changes neither finite entries nor their gradients, so a program
clamps in every call.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import FrameType

import torch
from torch import Tensor

__all__ = ["answer_to_clamp"]


def answer_to_clamp(branch: ast.If, frame: FrameType) -> bool | None:
    """The truth value for which `branch`, in the function that runs in `frame`, is taken; None: it does more than clamp
    the tensor that it asks about, or to bounds that some finite numbers exceed.
    """
    name, answer = _asked(branch.test)
    x = frame.f_locals.get(name)
    if not isinstance(x, Tensor) or not x.is_floating_point() or branch.orelse:
        return None
    bounds: dict[str, float] = {}
    *before, last = branch.body
    for statement in before:
        match statement:
            case ast.Assign([ast.Name(bound)], value) if bound != name:
                bounds[bound] = _number(value, name, x.dtype, bounds)
            case _:
                return None
    return answer if _clamps(last, name, x.dtype, bounds) else None


def _asked(test: ast.expr) -> tuple[str, bool]:
    """The tensor that a test asks for infinite entries, and the truth value with which there are some."""
    match test:
        case ast.UnaryOp(ast.Not(), ast.Call(ast.Attribute(inner, "all"), [], [])):
            return _argument(inner, "isfinite"), False
        case ast.Call(ast.Attribute(inner, "any"), [], []):
            return _argument(inner, "isinf"), True
        case _:
            return "", False


def _argument(call: ast.expr, function: str) -> str:
    """x in ``torch.function(x)`` or ``x.function()``; otherwise empty."""
    match call:
        case ast.Call(ast.Attribute(ast.Name("torch"), name), [ast.Name(x)], []) if name == function:
            return x
        case ast.Call(ast.Attribute(ast.Name(x), name), [], []) if name == function:
            return x
        case _:
            return ""


def _clamps(statement: ast.stmt, name: str, dtype: torch.dtype, bounds: Mapping[str, float]) -> bool:
    """Whether it is ``x = torch.clamp(x, min=..., max=...)`` with bounds that all finite numbers of `dtype` keep."""
    match statement:
        case ast.Assign(
            [ast.Name(written)], ast.Call(ast.Attribute(ast.Name("torch"), "clamp"), [ast.Name(read)], keywords)
        ) if written == read == name:
            found = {each.arg: _number(each.value, name, dtype, bounds) for each in keywords}
        case _:
            return False
    largest = torch.finfo(dtype).max
    return found.keys() == {"min", "max"} and found["min"] <= -largest and largest <= found["max"]


def _number(value: ast.expr, name: str, dtype: torch.dtype, bounds: Mapping[str, float]) -> float:
    """What an expression of the largest number of `dtype`, that of the tensor called `name`, comes to; NaN: another."""
    match value:
        case ast.Attribute(
            ast.Call(ast.Attribute(ast.Name("torch"), "finfo"), [ast.Attribute(ast.Name(of), "dtype")], []), "max"
        ) if of == name:
            return torch.finfo(dtype).max
        case ast.BinOp(left, ast.Sub(), ast.Constant(int() | float() as right)):
            return _number(left, name, dtype, bounds) - float(right)
        case ast.UnaryOp(ast.USub(), operand):
            return -_number(operand, name, dtype, bounds)
        case ast.Name(known):
            return bounds.get(known, float("nan"))
        case _:
            return float("nan")
