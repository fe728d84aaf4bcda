"""Closed forms: the seconds and bytes of a layer's ops as formulas of microbatches and of the degrees of mesh axes.

A strategy's factors determine which dims of tensors an axis splits.  The sizes of axes are symbols, ``d0`` for the
outermost axis, ``d1`` ..., and so is the number of microbatches, ``m``.  The formulas come from running the code of
`autopar.ops.work` and `roofline` on `Quantity`.  They hold as long as every comparison in that code has the same
outcome (rows stay aligned, a result stays larger than an operand ...).

A `Quantity` has a value and its sympy expression.  Code that computes with quantities, without knowing them, returns a
formula: so a closed form isn't a second version of that code.  Comparisons use the values.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import sympy

from autopar.cluster import Cluster, Device
from autopar.cost.collective_prices import collective_terms
from autopar.cost.roofline import Roofline
from autopar.ops import Work, count_work
from autopar.placement import REPLICATE, Axis, Placement
from autopar.plan import LayerStrategy
from autopar.program import Layer, Op, Program, TensorType

__all__ = ["Form", "OpForm", "Quantity", "collective_form", "describe", "formula_text", "larger", "layer_forms"]


_op: Any = operator  # half of it has no types


def _binary(
    compute: Callable[[Any, Any], Any], formula: Callable[[Any, Any], Any] | None = None, *, is_swapped: bool = False
) -> Callable[[Quantity, object], Quantity]:
    """A method that applies `compute` to the values, and `formula` (by default `compute`) to the expressions."""

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
    """A number with its expression; see the module's docstring."""

    __slots__ = ("expression", "value")

    def __init__(self, value: float, expression: Any) -> None:
        """Pair `expression` with its `value` for the current values of the symbols."""
        self.value, self.expression = value, expression

    @classmethod
    def symbol(cls, name: str, value: float) -> Quantity:
        """A symbol for a positive integer, with its current value."""
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
    __hash__ = None  # pyright: ignore[reportAssignmentType]  (equal only for the current values of the symbols)

    def __bool__(self) -> bool:
        return self.value != 0


def _parts(number: object) -> tuple[Any, Any]:
    """The value and the exact expression of a number."""
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
        return one if a >= b else other  # one of them is 0: no Max in the formula
    return Quantity(max(a, b), sympy.Max(x, y, evaluate=False))


_Cuts = tuple[tuple[Placement, ...], ...]  # for each tensor, its placement on each axis


@dataclass(frozen=True)
class Form:
    """The formulas (sympy) of one op on one device for one microbatch."""

    flops: Any
    num_bytes: Any
    forward_s: Any
    backward_s: Any


@dataclass(frozen=True, eq=False)
class OpForm:
    """One op under the factors of a strategy, with degrees as symbols.

    Args:
        op: the op.
        operands: the global type of each operand, and its placement for each symbol of `names`.
        results: the same for the results.
        names: the symbols, microbatches first.
        device: the device that it runs on.
        point: the values of the symbols (those of the strategy) that determine the outcome of comparisons in `form`.
        differentiable: whether it has a backward.
    """

    op: Op
    operands: tuple[tuple[TensorType, tuple[Placement, ...]], ...]
    results: tuple[tuple[TensorType, tuple[Placement, ...]], ...]
    names: tuple[str, ...]
    device: Device
    point: tuple[int, ...]
    differentiable: bool

    @cached_property
    def form(self) -> Form:
        """The formulas, which hold around `point`.

        Raises:
            MissingPriceError: the device has no rate for the op's dtype.
        """
        symbols = [Quantity.symbol(name, value) for name, value in zip(self.names, self.point, strict=True)]
        operands, results = (
            tuple(_local(tensor, cuts, symbols) for tensor, cuts in side) for side in (self.operands, self.results)
        )
        work: Work = count_work(self.op, operands, results)
        forward_s, backward_s = replace(Roofline.of(self.device), larger=larger).seconds(work)
        if not self.differentiable:
            backward_s = 0.0
        parts = (work.flops, work.num_bytes, forward_s, backward_s)
        return Form(*(part.expression if isinstance(part, Quantity) else part for part in parts))


def _local(tensor: TensorType, cuts: tuple[Placement, ...], symbols: list[Quantity]) -> TensorType:
    """The local type on one device; sizes of split dims are quantities."""
    sizes: list[Any] = list(tensor.shape)
    for placement, symbol in zip(cuts, symbols, strict=True):
        if placement.is_shard:
            sizes[placement.dim] = sizes[placement.dim] / symbol
    return TensorType(cast("tuple[int, ...]", tuple(sizes)), tensor.dtype)


def layer_forms(
    program: Program,
    layer: Layer,
    strategy: LayerStrategy,
    device: Device,
    num_microbatches: int = 1,
    *,
    is_training: bool = True,
) -> tuple[OpForm, ...]:
    """The closed form of every op of `layer` (the first of its kind) under the strategy's factors.

    Symbols are ``m`` for the number of microbatches, then ``d0``, ``d1`` ... for the degrees of the mesh's axes.
    """
    names = ("m", *(f"d{axis}" for axis in range(len(strategy.mesh))))
    time = strategy.time or ("-",) * len(layer.ops)
    forms: list[OpForm] = []
    for op, factors, in_time in zip(layer.ops, strategy.assignments, time, strict=True):
        operands, results = zip(*(_placements(op, factor) for factor in (in_time, *factors)), strict=True)
        differentiable = is_training and any(program.values[name].requires_grad for name in op.results)
        cut_operands, cut_results = _cut(program, op.operands, operands), _cut(program, op.results, results)
        point = (num_microbatches, *strategy.mesh)
        forms.append(OpForm(op, cut_operands, cut_results, names, device, point, differentiable))
    return tuple(forms)


def _placements(op: Op, factor: str) -> tuple[tuple[Placement, ...], tuple[Placement, ...]]:
    for option in op.options:
        if option.factor == factor:
            ring = option.traveling  # operands of which a device computes with all slices, one after another
            operands = (REPLICATE if index in ring else cut for index, cut in enumerate(option.operands))
            return tuple(operands), option.results
    return (REPLICATE,) * len(op.operands), (REPLICATE,) * len(op.results)


def _cut(
    program: Program, names: tuple[str, ...], by_axis: tuple[tuple[Placement, ...], ...]
) -> tuple[tuple[TensorType, tuple[Placement, ...]], ...]:
    cuts: _Cuts = tuple(zip(*by_axis, strict=True)) if names else ()
    return tuple((program.type_of(name), cut) for name, cut in zip(names, cuts, strict=True))


def collective_form(cluster: Cluster, kind: str, axis: Axis) -> Any:
    """Seconds of one collective as a formula of the bytes ``n`` of its buffer, without measured curves.

    Raises:
        MissingPriceError: this kind has no price.
    """
    size = Quantity.symbol("n", 1)
    seconds: Any = collective_terms(cluster, kind, axis).seconds(cast("float", size))
    return seconds.expression if isinstance(seconds, Quantity) else seconds


def describe(program: Program, layer: Layer, strategy: LayerStrategy, device: Device, num_microbatches: int = 1) -> str:
    """Format the closed forms of all ops of a layer under a strategy."""
    sizes = " x ".join(f"d{axis} = {size}" for axis, size in enumerate(strategy.mesh))
    lines = [f"{layer.name}: microbatches m = {num_microbatches}, degrees {sizes}; one microbatch on one device"]
    for op_form in layer_forms(program, layer, strategy, device, num_microbatches, is_training=program.training):
        form = op_form.form
        lines.append(f"  {op_form.op.name} ({op_form.op.target})")
        rows = [("flops", form.flops), ("bytes", form.num_bytes), ("forward s", form.forward_s)]
        rows += [("backward s", form.backward_s)] if op_form.differentiable else []
        lines += [f"    {name:<10} = {formula_text(formula)}" for name, formula in rows if formula]
    return "\n".join(lines) + "\n"


def formula_text(formula: Any) -> str:
    """Format a formula with numbers of four digits."""
    return re.sub(r"\d+\.\d+(e[-+]\d+)?", lambda match: f"{float(match[0]):.4g}", str(formula))
