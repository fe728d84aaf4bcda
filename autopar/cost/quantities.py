"""Numbers that remember their formula.

A `Quantity` has a value and the sympy expression that gave it.  What is computed with quantities by code that knows
nothing of them comes out as a formula: so a closed form is no second version of what it is the form of.  Wherever that
code decides by comparing, the value decides: the formula holds wherever all comparisons come out as they did.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import sympy

__all__ = ["Quantity", "larger"]

_op: Any = operator  # half of it has no types


def _binary(
    compute: Callable[[Any, Any], Any], formula: Callable[[Any, Any], Any] | None = None, *, is_swapped: bool = False
) -> Callable[[Quantity, object], Quantity]:
    """A method that computes with the values, and with the expressions (in another way if `formula` says so)."""

    def method(self: Quantity, other: object) -> Quantity:
        pairs = zip(_parts(self), _parts(other), strict=True)
        (a, b), (x, y) = (pair[::-1] for pair in pairs) if is_swapped else pairs
        return Quantity(compute(a, b), (formula or compute)(x, y))

    return method


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Quantity, object], bool]:
    def method(self: Quantity, other: object) -> bool:
        return compare(self.value, _parts(other)[0])

    return method


def _floor_formula(one: Any, other: Any) -> Any:
    return sympy.floor(one / other, evaluate=False)


def _remainder_formula(one: Any, other: Any) -> Any:
    return sympy.Mod(one, other, evaluate=False)


class Quantity:
    """A number with its expression; see the module."""

    __slots__ = ("expression", "value")

    def __init__(self, value: float, expression: Any) -> None:
        """`value` is what `expression` comes to where the formula is made."""
        self.value, self.expression = value, expression

    @classmethod
    def symbol(cls, name: str, value: float) -> Quantity:
        """A positive whole number called `name` that is `value` here."""
        return cls(value, sympy.Symbol(name, positive=True, integer=True))

    __add__ = __radd__ = _binary(_op.add)
    __mul__ = __rmul__ = _binary(_op.mul)
    __sub__ = _binary(_op.sub)
    __rsub__ = _binary(_op.sub, is_swapped=True)
    __truediv__ = _binary(_op.truediv)
    __rtruediv__ = _binary(_op.truediv, is_swapped=True)
    __floordiv__ = _binary(_op.floordiv, _floor_formula)
    __mod__ = _binary(_op.mod, _remainder_formula)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)
    __eq__ = _comparison(operator.eq)  # pyright: ignore[reportAssignmentType]  (object's own is declared as a method)
    __hash__ = None  # pyright: ignore[reportAssignmentType]  (equal only where the symbols are what they are here)

    def __bool__(self) -> bool:
        return self.value != 0


def _parts(number: object) -> tuple[Any, Any]:
    """A number's value and its exact expression."""
    if isinstance(number, Quantity):
        return number.value, number.expression
    if isinstance(number, int):  # bool, too
        return int(number), sympy.Integer(int(number))
    if isinstance(number, float):
        is_whole = math.isfinite(number) and number.is_integer()
        return number, sympy.Integer(int(number)) if is_whole else sympy.Float(number, 17)
    raise TypeError(f"a quantity can be combined with numbers only, not with {number!r}")


def larger(one: Any, other: Any) -> Any:
    """The maximum of two numbers, as ``Max`` in the formula."""
    if not isinstance(one, Quantity) and not isinstance(other, Quantity):
        return max(one, other)
    (a, x), (b, y) = _parts(one), _parts(other)
    if not x or not y:
        return one if a >= b else other  # zero is never the larger one
    return Quantity(max(a, b), sympy.Max(x, y, evaluate=False))
