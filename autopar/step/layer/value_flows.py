"""How values flow through one layer: where each comes from, who reads it, and how microbatches cut it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import PlanMismatchError
from autopar.ops import family_of
from autopar.placement import BROADCAST, REPLICATE, Placement, local_shape
from autopar.program import Layer, Op, Option, Program, TensorType, Value

__all__ = ["Flow", "TimeView", "find_flows", "gets_gradient", "is_alias", "option_of", "options_of", "time_view"]


@dataclass(frozen=True)
class Flow:
    """One value on its way through a layer.

    Args:
        value: the value.
        source: ``"op"``, ``"input"`` or ``"state"``.
        producer: index of the op, or position among the layer's inputs or its parameters, buffers and constants.
        result: index among the producing op's results.
        readers: (index of op, index of operand), one entry per mention.
        output: position among the layer's outputs, -1 if it stays inside.
    """

    value: Value
    source: str
    producer: int
    result: int
    readers: tuple[tuple[int, int], ...]
    output: int

    @property
    def is_parameter(self) -> bool:
        """Whether it is a stored parameter (its first reshard is the ZeRO gather)."""
        return self.source == "state" and self.value.role == "parameter"

    @property
    def num_readers(self) -> int:
        """Mentions among operands, and one if it leaves the layer."""
        return len(self.readers) + (self.output >= 0)


def gets_gradient(program: Program, value: Value) -> bool:
    """Whether a layer's output gets a gradient from other layers or as the loss: not if only the caller reads it."""
    if not value.requires_grad:
        return False
    if not program.loss or value.name in program.loss_terms:
        return True
    return value.name not in program.outputs or any(value.name in layer.inputs for layer in program.layers)


def find_flows(program: Program, layer: Layer) -> dict[str, Flow]:
    """The flow of every value that the layer reads or computes, by name."""
    readers: dict[str, list[tuple[int, int]]] = {}
    for index, op in enumerate(layer.ops):
        for mention, name in enumerate(op.operands):
            readers.setdefault(name, []).append((index, mention))
    sources = [(name, "input", position, 0) for position, name in enumerate(layer.inputs)]
    sources += [(name, "state", position, 0) for position, name in enumerate(layer.state)]
    for index, op in enumerate(layer.ops):
        sources += [(name, "op", index, result) for result, name in enumerate(op.results)]
    outputs = {name: position for position, name in enumerate(layer.outputs)}
    return {
        name: Flow(
            program.values[name],
            source,
            producer,
            result,
            tuple(readers.get(name, ())),
            outputs.get(name, -1),
        )
        for name, source, producer, result in sources
    }


def is_alias(layer: Layer, flows: Mapping[str, Flow], op: Op) -> bool:
    """Whether the op's result is a view of its first operand; taken for a copy where that depends on
    strides.
    """
    if not op.is_view or not op.operands:
        return False
    if not family_of(op.target).may_copy:
        return True
    flow = flows[op.operands[0]]
    while flow.source == "op" and layer.ops[flow.producer].is_view and layer.ops[flow.producer].operands:
        viewed = layer.ops[flow.producer]
        family = family_of(viewed.target)
        if family.may_copy:
            return True
        if not family.keeps_order:
            return False
        flow = flows[viewed.operands[0]]
    return True


def options_of(op: Op) -> tuple[Option, ...]:
    """The op's options, with ``"-"`` and ``"~"``, which every op has, even if its rule did not list them."""
    listed = {option.factor for option in op.options}
    extra = tuple(
        Option(factor, (placement,) * len(op.operands), (placement,) * len(op.results))
        for factor, placement in (("-", REPLICATE), ("~", BROADCAST))
        if factor not in listed
    )
    return op.options + extra


def option_of(op: Op, factor: str) -> Option:
    """The op's option of this factor.

    Raises:
        PlanMismatchError: the op has no such factor.
    """
    for option in options_of(op):
        if option.factor == factor:
            return option
    raise PlanMismatchError(
        f"op {op.name} ({op.target}) has no factor {factor!r}; it has {[option.factor for option in options_of(op)]}"
    )


@dataclass(frozen=True)
class TimeView:
    """What microbatches cut: placements on the axis in time, outside all device axes.

    `factors`, `operands` and `results` hold each op's option in time and its placements, `values` those of
    values on their way to the copy layout: an input or parameter that all readers slice the same way is
    sliced before, else it stays whole.
    """

    num_microbatches: int
    factors: tuple[str, ...]
    operands: tuple[tuple[Placement, ...], ...]
    results: tuple[tuple[Placement, ...], ...]
    values: dict[str, Placement]

    def cut(self, tensor: TensorType, placement: Placement) -> TensorType:
        """The part of `tensor` that one microbatch holds."""
        if self.num_microbatches == 1 or not placement.is_shard:
            return tensor
        return TensorType(local_shape(tensor.shape, (placement,), (self.num_microbatches,)), tensor.dtype)

    def value_type(self, flow: Flow) -> TensorType:
        """What one microbatch holds of this value where it is produced or arrives."""
        return self.cut(flow.value.type, self.values[flow.value.name])

    def taken(self, flow: Flow) -> frozenset[Placement]:
        """The slices that readers take of a value that comes to them whole."""
        placements = {self.operands[op][mention] for op, mention in flow.readers} - {self.values[flow.value.name]}
        return frozenset(placement for placement in placements if placement.is_shard)

    def reader_type(self, flow: Flow, op: int, mention: int) -> TensorType:
        """What one microbatch holds of this value where the op of this index reads it."""
        return self.cut(flow.value.type, self.operands[op][mention])


def time_view(layer: Layer, flows: dict[str, Flow], time: tuple[str, ...], num_microbatches: int) -> TimeView:
    """The placements in time that the factors `time` (one per op; ``()`` for one microbatch) stand for."""
    factors = time if time and num_microbatches > 1 else ("-",) * len(layer.ops)
    options = [option_of(op, factor) for op, factor in zip(layer.ops, factors, strict=True)]
    operands = tuple(option.operands for option in options)
    results = tuple(option.results for option in options)
    values = {name: _time_of(flow, operands, results) for name, flow in flows.items()}
    return TimeView(num_microbatches, tuple(factors), operands, results, values)


def _time_of(
    flow: Flow, operands: tuple[tuple[Placement, ...], ...], results: tuple[tuple[Placement, ...], ...]
) -> Placement:
    """How a value goes to its copy layout in time: as an op makes it; what arrives: sliced if all readers do so."""
    if flow.source == "op":
        return results[flow.producer][flow.result]
    placements = {operands[op][mention] for op, mention in flow.readers}
    only = placements.pop() if len(placements) == 1 else REPLICATE
    return only if only.is_shard and not flow.is_parameter else REPLICATE
