"""Closed forms: the seconds and bytes of a layer's ops as formulas of microbatches and of the degrees of mesh axes.

Which dim of which tensor an axis cuts is what a strategy's factors say; here the axes' sizes stay symbols, ``d0`` for
the outermost axis, ``d1`` ..., and so does the number of microbatches, ``m``.  The formulas are those of `work` and
`roofline` themselves, run on `Quantity`.  They hold as long as every decision in there comes out alike (rows stay
aligned, a result stays larger than an operand ...); `OpForm.seconds` takes another formula where one does not, so that
values computed in one go are those of one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from autopar.cluster import Cluster, Device
from autopar.cost.collectives import collective_terms
from autopar.cost.curves import Curve
from autopar.cost.quantities import Guard, Quantity, Trail, evaluate, larger
from autopar.cost.roofline import Roofline
from autopar.ops import Work, count_work
from autopar.placement import REPLICATE, Axis, Placement
from autopar.plan import LayerStrategy
from autopar.program import Layer, Op, Program, TensorType

__all__ = ["Form", "OpForm", "collective_form", "curve_seconds", "describe", "formula_text", "layer_forms"]

Array = npt.NDArray[np.float64]
_Cuts = tuple[tuple[Placement, ...], ...]  # per tensor, its placement on each axis


@dataclass(frozen=True)
class Form:
    """Formulas (sympy) of one op on one device for one microbatch, and where they hold."""

    flops: Any
    num_bytes: Any
    forward_s: Any
    backward_s: Any
    guards: tuple[Guard, ...]


@dataclass(frozen=True, eq=False)
class OpForm:
    """One op under the factors of a strategy, with the degrees left open.

    Args:
        op: the op.
        operands: global types, and where each is cut: its placement per symbol of `names`.
        results: the same of what it defines.
        names: the symbols, microbatches first.
        device: what it runs on.
        point: values of the symbols, here those of the strategy: where `form` is taken.
        differentiable: whether it has a backward.
    """

    op: Op
    operands: tuple[tuple[TensorType, tuple[Placement, ...]], ...]
    results: tuple[tuple[TensorType, tuple[Placement, ...]], ...]
    names: tuple[str, ...]
    device: Device
    point: tuple[int, ...]
    differentiable: bool
    _known: list[Form] = field(default_factory=list[Form], repr=False)

    @cached_property
    def form(self) -> Form:
        """The formulas around `point`.

        Raises:
            MissingPriceError: the device has no rate for the op's dtype.
        """
        return self._trace(self.point)

    def seconds(self, columns: Mapping[str, Array]) -> tuple[Array, Array]:
        """Seconds forward and backward for all values of the symbols at once.

        Raises:
            MissingPriceError: the device has no rate for the op's dtype.
        """
        known = {name: np.asarray(columns[name], dtype=np.float64) for name in self.names}
        count = len(known[self.names[0]])
        forward_s, backward_s = np.zeros((2, count))
        left = np.arange(count)
        forms = iter(self._known or [self.form])
        while len(left):
            form = next(forms, None)
            here = {name: column[left] for name, column in known.items()}
            if form is None:
                form = self._trace(tuple(int(here[name][0]) for name in self.names))
            kept = np.ones(len(left), dtype=bool)
            for guard in form.guards:
                kept &= guard.is_kept(here)
            at = {name: column[kept] for name, column in here.items()}
            forward_s[left[kept]] = evaluate(form.forward_s, at)
            backward_s[left[kept]] = evaluate(form.backward_s, at)
            left = left[~kept]
        return forward_s, backward_s

    def _trace(self, point: Sequence[int]) -> Form:
        trail = Trail()
        symbols = [trail.symbol(name, value) for name, value in zip(self.names, point, strict=True)]
        operands, results = (
            tuple(_local(tensor, cuts, symbols) for tensor, cuts in each) for each in (self.operands, self.results)
        )
        work: Work = count_work(self.op, operands, results)
        forward_s, backward_s = replace(Roofline.of(self.device), larger=larger).seconds(work)
        if not self.differentiable:
            backward_s = 0.0
        parts = (work.flops, work.num_bytes, forward_s, backward_s)
        flops, num_bytes, ahead, back = (each.expression if isinstance(each, Quantity) else each for each in parts)
        found = Form(flops, num_bytes, ahead, back, tuple(trail.guards))
        self._known.append(found)
        return found


def _local(tensor: TensorType, cuts: tuple[Placement, ...], symbols: list[Quantity]) -> TensorType:
    """The type on one device, its sizes quantities where they are cut."""
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
    """The closed form of every op of `layer` (of its kind, the first) under the strategy's factors.

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
            return option.operands, option.results
    return (REPLICATE,) * len(op.operands), (REPLICATE,) * len(op.results)


def _cut(
    program: Program, names: tuple[str, ...], by_axis: tuple[tuple[Placement, ...], ...]
) -> tuple[tuple[TensorType, tuple[Placement, ...]], ...]:
    cuts: _Cuts = tuple(zip(*by_axis, strict=True)) if names else ()
    return tuple((program.type_of(name), cut) for name, cut in zip(names, cuts, strict=True))


def collective_form(cluster: Cluster, kind: str, axis: Axis) -> Any:
    """Seconds of one collective, a formula of its buffer ``n`` in bytes, where no curve was measured.

    Raises:
        MissingPriceError: this kind has no price.
    """
    size = Trail().symbol("n", 1)
    seconds: Any = collective_terms(cluster, kind, axis).seconds(cast("float", size))
    return seconds.expression if isinstance(seconds, Quantity) else seconds


def curve_seconds(curve: Curve, amounts: Array) -> Array:
    """`Curve.seconds` of many amounts of work at once."""
    at = np.log(np.maximum(amounts, curve.points[0].amount))
    amount_logs = np.log([point.amount for point in curve.points])
    second_logs = np.maximum.accumulate(np.log([point.seconds for point in curve.points]))
    beyond = np.maximum(at - amount_logs[-1], 0.0)
    return np.exp(np.interp(at, amount_logs, second_logs) + beyond)


def describe(program: Program, layer: Layer, strategy: LayerStrategy, device: Device, num_microbatches: int = 1) -> str:
    """The closed forms of a layer under a strategy as text, one op after the other."""
    sizes = " x ".join(f"d{axis} = {size}" for axis, size in enumerate(strategy.mesh))
    lines = [f"{layer.name}: microbatches m = {num_microbatches}, degrees {sizes}; one microbatch on one device"]
    for each in layer_forms(program, layer, strategy, device, num_microbatches, is_training=program.training):
        form = each.form
        lines.append(f"  {each.op.name} ({each.op.target})")
        rows = [("flops", form.flops), ("bytes", form.num_bytes), ("forward s", form.forward_s)]
        rows += [("backward s", form.backward_s)] if each.differentiable else []
        lines += [f"    {name:<10} = {formula_text(formula)}" for name, formula in rows if formula]
    return "\n".join(lines) + "\n"


def formula_text(formula: Any) -> str:
    """A formula with numbers of four digits."""
    return re.sub(r"\d+\.\d+(e[-+]\d+)?", lambda found: f"{float(found[0]):.4g}", str(formula))
