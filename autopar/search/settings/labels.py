"""Usual names for the role of a mesh axis in a layer, derived from placements alone.

===========================  ================================================================================
name                         what it is here
===========================  ================================================================================
``data``                     activations are cut in the batch (dim 0), weights are read whole
``tensor``                   weight matrices are cut, activations cross the layer's boundary whole
``tensor+sequence``          weight matrices are cut, activations cross the boundary cut in dim 1
``sequence (Ulysses)``       weights are whole, the boundary is cut in dim 1, attention is cut in its heads
``context``                  weights are whole, attention is cut in its queries, images and videos are split in space
``sequence``                 weights are whole, activations are cut in dim 1, no attention in the layer
``vocabulary``               only an embedding, a classifier or its loss is cut, in the number of classes
``expert``                   weights that are stacks of matrices are cut in the stack
``replicated``               nothing is cut
``mixed``                    none of these
===========================  ================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from autopar.ops import family_of
from autopar.ops.halos import space_dim
from autopar.plan import LayerStrategy
from autopar.program import Layer, Op, Option, Program

__all__ = ["DEGREE_LABELS", "axis_labels", "cuts_stack", "degrees", "option_of", "weight_operands"]

# The degree that a user demands -> the labels that count towards it.
DEGREE_LABELS = {
    "data": ("data",),
    "tensor": ("tensor", "tensor+sequence", "vocabulary"),
    "sequence": ("sequence (Ulysses)", "sequence", "context"),
    "context": ("context", "sequence"),
    "expert": ("expert",),
}
_MOST = 0.8  # of what is cut, from which share on it gives the axis its name: odd ops are no reason for another
_JOINS = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default", "aten.flatten.using_ints")


def option_of(op: Op, factor: str) -> Option | None:
    """The op's option for `factor`, or None for the ways to run whole."""
    return next((option for option in op.options if option.factor == factor), None)


def weight_operands(program: Program, op: Op) -> tuple[int, ...]:
    """Which operands of `op` are weight matrices: parameters with at least two dims."""
    return tuple(
        position
        for position, name in enumerate(op.operands)
        if program.values[name].role == "parameter" and len(program.type_of(name).shape) > 1
    )


def cuts_stack(program: Program, op: Op, option: Option, position: int) -> bool:
    """Whether a weight is a stack of matrices (no filter), of which the option gives each device some."""
    placement, result = option.operands[position], option.results[0]
    is_stack = len(program.type_of(op.operands[position]).shape) == 3 and placement.is_shard and placement.dim == 0
    return is_stack and not (result.is_shard and result.dim != 0)


@dataclass
class _Tally:
    """Elements of a layer's tensors on one axis, by what happens to them."""

    weights: dict[str, float] = field(default_factory=dict[str, float])
    activations: dict[int, float] = field(default_factory=dict[int, float])
    attention: set[str] = field(default_factory=set[str])
    is_vocabulary: bool = False
    is_in_space: bool = False

    def share_of_weights(self, what: str) -> float:
        return self.weights.get(what, 0.0) / max(1.0, math.fsum(self.weights.values()))

    def share_of_dim(self, dim: int) -> float:
        cut = math.fsum(size for key, size in self.activations.items() if key >= 0)
        return self.activations.get(dim, 0.0) / max(1.0, cut)


def axis_labels(program: Program, layer: Layer, strategy: LayerStrategy) -> tuple[str, ...]:
    """The usual name of what each axis of the strategy's mesh does in `layer`."""
    return tuple(_label(program, layer, strategy, axis) for axis in range(len(strategy.mesh)))


def degrees(labels: tuple[str, ...], mesh: tuple[int, ...]) -> dict[str, int]:
    """Name of a degree (``"data"`` ...) -> the product of the sizes of the axes that do it."""
    return {
        name: math.prod(size for label, size in zip(labels, mesh, strict=True) if label in counted)
        for name, counted in DEGREE_LABELS.items()
    }


def _label(program: Program, layer: Layer, strategy: LayerStrategy, axis: int) -> str:
    tally = _count(program, layer, strategy, axis)
    if all(dim < 0 for dim in tally.activations) and tally.share_of_weights("whole") == 1.0:
        return "replicated"
    if tally.share_of_weights("stack") > 0.5:
        return "expert"
    if tally.share_of_weights("cut") > 0.5:
        if tally.is_vocabulary:
            return "vocabulary"
        return "tensor+sequence" if _crosses_in_sequence(program, layer, strategy, axis) else "tensor"
    if tally.share_of_dim(0) >= _MOST:
        return "data"
    return _label_sequence(tally) or ("vocabulary" if tally.is_vocabulary else _label_rest(tally))


def _label_sequence(tally: _Tally) -> str:
    if tally.attention == {"heads"} and tally.activations.get(1, 0.0):
        return "sequence (Ulysses)"
    in_space = tally.is_in_space and tally.attention <= {"queries", "whole"} and tally.share_of_dim(0) <= 1 - _MOST
    if in_space or tally.attention == {"queries"}:
        return "context"
    return "sequence" if tally.share_of_dim(1) >= _MOST else ""


def _label_rest(tally: _Tally) -> str:
    return "replicated" if all(dim < 0 for dim in tally.activations) else "mixed"


def _count(program: Program, layer: Layer, strategy: LayerStrategy, axis: int) -> _Tally:
    tally = _Tally()
    for op, factors in zip(layer.ops, strategy.assignments, strict=True):
        option = option_of(op, factors[axis])
        tally.is_in_space |= space_dim(factors[axis]) > 0
        _count_weights(program, op, option, tally)
        for name, dim in _cut_dims(op, option):
            if program.type_of(name).is_floating:
                tally.activations[dim] = tally.activations.get(dim, 0.0) + program.type_of(name).num_elements
        if family_of(op.target).is_attention:
            tally.attention.add(_attention_part(program, op, option))
    return tally


def _count_weights(program: Program, op: Op, option: Option | None, tally: _Tally) -> None:
    for position in weight_operands(program, op):
        weight = program.type_of(op.operands[position])
        is_cut = option is not None and option.operands[position].is_shard
        in_stack = option is not None and cuts_stack(program, op, option, position)
        what = "stack" if in_stack else "cut" if is_cut else "whole"
        tally.weights[what] = tally.weights.get(what, 0.0) + weight.num_elements
    if option is not None and option.kernel:
        kernel = family_of(op.target).kernels.get(option.kernel)
        tally.is_vocabulary |= kernel is not None and kernel.cuts_vocabulary


def _cut_dims(op: Op, option: Option | None) -> Iterator[tuple[str, int]]:
    """Results with the dim that is cut, -1 for none; tokens that a view joins with a batch of one are still tokens.

    What is cut in the first result counts for the others, such as a recurrent module's states [layers, batch, hidden].
    """
    main = -1
    for position, name in enumerate(op.results):
        placement = option.results[position] if option is not None else None
        dim = placement.dim if placement is not None and placement.is_shard else -1
        if dim == 0 and option is not None and op.target in _JOINS and option.operands[0].is_shard:
            dim = option.operands[0].dim
        main = dim if position == 0 else main
        yield name, main if dim >= 0 and main >= 0 else dim


def _attention_part(program: Program, op: Op, option: Option | None) -> str:
    if option is None or not option.results[0].is_shard:
        return "whole"
    num_dims = len(program.type_of(op.results[0]).shape)
    return {0: "batch", num_dims - 2: "queries"}.get(option.results[0].dim, "heads")


def _crosses_in_sequence(program: Program, layer: Layer, strategy: LayerStrategy, axis: int) -> bool:
    names = (*layer.inputs, *layer.outputs)
    layouts = (*strategy.inputs, *strategy.outputs)
    return any(
        layout[axis].is_shard and layout[axis].dim == 1
        for name, layout in zip(names, layouts, strict=True)
        if program.values[name].requires_grad
    )
