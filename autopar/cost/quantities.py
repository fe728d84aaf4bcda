"""Numbers that remember their formula.

A `Quantity` has a value and the sympy expression that gave it.  What is computed with quantities by code that knows
nothing of them comes out as a formula: so a closed form is no second version of what it is the form of.  Wherever that
code decides by comparing, the value decides, and the comparison is noted as a `Guard`: the formula holds wherever all
of them come out as they did.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy

__all__ = ["Guard", "Quantity", "Trail", "evaluate", "larger"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Guard:
    """A comparison of `left` with `right` (sympy expressions) that came out as `holds`."""

    compare: Callable[[Any, Any], Any]
    left: Any
    right: Any
    holds: bool

    def is_kept(self, columns: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
        """Where among these values of the symbols it comes out the same."""
        found = self.compare(evaluate(self.left, columns), evaluate(self.right, columns))
        return np.asarray(found == self.holds)


@dataclass(eq=False)
class Trail:
    """The comparisons that were made of quantities of one computation, each once."""

    guards: list[Guard] = field(default_factory=list[Guard])

    def symbol(self, name: str, value: float) -> Quantity:
        """A positive whole number called `name` that is `value` here."""
        return Quantity(value, sympy.Symbol(name, positive=True, integer=True), self)


class Quantity:
    """A number with its expression; see the module."""

    __slots__ = ("expression", "trail", "value")

    def __init__(self, value: float, expression: Any, trail: Trail) -> None:
        """`value` is what `expression` comes to where `trail` is made."""
        self.value, self.expression, self.trail = value, expression, trail

    def _with(self, other: object, compute: Callable[[Any, Any], Any], *, swapped: bool = False) -> Quantity:
        value, expression = _parts(other)
        mine = (self.value, self.expression)
        (a, x), (b, y) = ((value, expression), mine) if swapped else (mine, (value, expression))
        formula: Any = _FORMULAS.get(compute, compute)(x, y)
        return Quantity(compute(a, b), formula, self.trail)

    def __add__(self, other: object) -> Quantity:
        """The sum."""
        return self._with(other, operator.add)

    __radd__ = __add__

    def __mul__(self, other: object) -> Quantity:
        """The product."""
        return self._with(other, operator.mul)

    __rmul__ = __mul__

    def __sub__(self, other: object) -> Quantity:
        """The difference."""
        return self._with(other, operator.sub)

    def __rsub__(self, other: object) -> Quantity:
        """The difference from a number."""
        return self._with(other, operator.sub, swapped=True)

    def __truediv__(self, other: object) -> Quantity:
        """The ratio."""
        if isinstance(other, float) and np.isinf(other):
            return Quantity(0.0, sympy.Float(0), self.trail)
        return self._with(other, _ratio)

    def __rtruediv__(self, other: object) -> Quantity:
        """A number over this."""
        return self._with(other, _ratio, swapped=True)

    def __floordiv__(self, other: object) -> Quantity:
        """The ratio without its fraction."""
        return self._with(other, _floor_ratio)

    def __mod__(self, other: object) -> Quantity:
        """What is left of dividing."""
        return self._with(other, _rest)

    def _compared(self, other: object, compare: Callable[[Any, Any], Any]) -> bool:
        value, expression = _parts(other)
        holds = bool(compare(self.value, value))
        guard = Guard(compare, self.expression, expression, holds)
        difference: Any = self.expression - expression
        if difference.free_symbols and guard not in self.trail.guards:
            self.trail.guards.append(guard)
        return holds

    def __lt__(self, other: object) -> bool:
        """By value, noted."""
        return self._compared(other, operator.lt)

    def __le__(self, other: object) -> bool:
        """By value, noted."""
        return self._compared(other, operator.le)

    def __gt__(self, other: object) -> bool:
        """By value, noted."""
        return self._compared(other, operator.gt)

    def __ge__(self, other: object) -> bool:
        """By value, noted."""
        return self._compared(other, operator.ge)

    def __eq__(self, other: object) -> bool:
        """By value, noted."""
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> bool:
        """By value, noted."""
        return not self._compared(other, operator.eq)

    def __bool__(self) -> bool:
        """Whether it is not 0, noted."""
        return not self._compared(0, operator.eq)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (equal only where the symbols are what they are here)


def _ratio(one: Any, other: Any) -> Any:
    return one / other


def _floor_ratio(one: Any, other: Any) -> Any:
    return one // other


def _rest(one: Any, other: Any) -> Any:
    return one % other


def _floor_formula(one: Any, other: Any) -> Any:
    return sympy.floor(one / other, evaluate=False)


def _rest_formula(one: Any, other: Any) -> Any:
    return sympy.Mod(one, other, evaluate=False)


# What is written as another formula than is computed.
_FORMULAS: dict[Callable[[Any, Any], Any], Callable[[Any, Any], Any]] = {
    _floor_ratio: _floor_formula,
    _rest: _rest_formula,
}


def _parts(number: object) -> tuple[Any, Any]:
    if isinstance(number, Quantity):
        return number.value, number.expression
    if isinstance(number, bool | int):
        return int(number), sympy.Integer(int(number))
    if isinstance(number, float):
        return number, sympy.Integer(int(number)) if number.is_integer() else sympy.Float(number, 17)
    raise TypeError(f"a quantity can be reckoned with numbers only, not with {number!r}")


def larger(one: Any, other: Any) -> Any:
    """The maximum of two numbers, as ``Max`` in the formula."""
    trail = next((each.trail for each in (one, other) if isinstance(each, Quantity)), None)
    if trail is None:
        return max(one, other)
    (a, x), (b, y) = _parts(one), _parts(other)
    if not x or not y:
        return one if a >= b else other  # the other one is nothing wherever it is looked at
    return Quantity(max(a, b), sympy.Max(x, y, evaluate=False), trail)


def evaluate(expression: Any, columns: Mapping[str, Array]) -> Any:
    """The values of an expression of quantities, all at once."""
    known: dict[Any, Any] = {}

    def value(node: Any) -> Any:
        if node not in known:
            known[node] = _value(node, columns, value)
        return known[node]

    return value(sympy.sympify(expression))


def _value(node: Any, columns: Mapping[str, Array], value: Callable[[Any], Any]) -> Any:
    if node.is_Symbol:
        return columns[node.name]
    if not node.args:
        return float(node)
    parts = [value(part) for part in node.args]
    if node.is_Pow:
        return np.power(parts[0], parts[1])
    if isinstance(node, sympy.Mod):
        return np.mod(parts[0], parts[1])
    if isinstance(node, sympy.floor):
        return np.floor(parts[0])
    combine = np.add if node.is_Add else np.multiply if node.is_Mul else np.maximum
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total
