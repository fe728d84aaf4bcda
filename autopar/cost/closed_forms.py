"""Closed forms: the seconds and bytes of a layer's ops as formulas of microbatches and of the degrees of mesh axes.

Which dim of which tensor an axis cuts is what a strategy's factors say; here the axes' sizes stay symbols, ``d0`` for
the outermost axis, ``d1`` ..., and so does the number of microbatches, ``m``.  The formulas are those of
`autopar.ops.work` and `roofline` themselves, run on `Quantity`.  They hold as long as every decision in there comes out
the same (rows stay aligned, a result stays larger than an operand ...).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from autopar.cluster import Cluster, Device
from autopar.cost.collective_prices import collective_terms
from autopar.cost.quantities import Quantity, larger
from autopar.cost.roofline import Roofline
from autopar.ops import Work, count_work
from autopar.placement import REPLICATE, Axis, Placement
from autopar.plan import LayerStrategy
from autopar.program import Layer, Op, Program, TensorType

__all__ = ["Form", "OpForm", "collective_form", "describe", "formula_text", "layer_forms"]

_Cuts = tuple[tuple[Placement, ...], ...]  # per tensor, its placement on each axis


@dataclass(frozen=True)
class Form:
    """Formulas (sympy) of one op on one device for one microbatch."""

    flops: Any
    num_bytes: Any
    forward_s: Any
    backward_s: Any


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

    @cached_property
    def form(self) -> Form:
        """The formulas around `point`.

        Raises:
            MissingPriceError: the device has no rate for the op's dtype.
        """
        symbols = [Quantity.symbol(name, value) for name, value in zip(self.names, self.point, strict=True)]
        operands, results = (
            tuple(_local(tensor, cuts, symbols) for tensor, cuts in each) for each in (self.operands, self.results)
        )
        work: Work = count_work(self.op, operands, results)
        forward_s, backward_s = replace(Roofline.of(self.device), larger=larger).seconds(work)
        if not self.differentiable:
            backward_s = 0.0
        parts = (work.flops, work.num_bytes, forward_s, backward_s)
        return Form(*(each.expression if isinstance(each, Quantity) else each for each in parts))


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
    size = Quantity.symbol("n", 1)
    seconds: Any = collective_terms(cluster, kind, axis).seconds(cast("float", size))
    return seconds.expression if isinstance(seconds, Quantity) else seconds


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
