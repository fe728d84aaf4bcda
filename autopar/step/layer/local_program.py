"""What one device runs of a layer under a strategy, in order: the one derivation of it.

A value goes from where it is produced, arrives or is gathered to its *copy layout* once, from there to each reader::

    produced --(microbatch slice)--> --reshard--> copy --(microbatch slice)--> --reshard--> operand

`derive` writes this down as a list of instructions over local values.  `lower` emits an FX program from the list,
prices and simulation add up its collectives and ops, memory walks the lives of its tensors.  What brings a
parameter from its storage to its copy layout is not part of it (`PlacedLayer.to_copy`): the runtime does that ahead of
the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from autopar.errors import PlanMismatchError
from autopar.ops import family_of
from autopar.placement import BROADCAST, PARTIAL, REPLICATE, Layout, Placement, local_shape, reshard
from autopar.program import Op, TensorType, Value
from autopar.step.layer.instructions import (
    KeepInFirst,
    LocalProgram,
    LocalValue,
    Reshard,
    RunOp,
    Single,
    TakeMicrobatch,
)
from autopar.step.layer.kernel_parts import in_parts
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.pieces import in_pieces
from autopar.step.layer.value_flows import option_of

__all__ = ["derive", "local_program"]


@lru_cache(maxsize=256)  # prices, memory and simulation of one layer read it one after the other
def local_program(local: PlacedLayer) -> LocalProgram:
    """`derive` of a layer whose inputs arrive as it wants them."""
    return derive(local)


def derive(local: PlacedLayer, arrival_times: Sequence[Placement] | None = None) -> LocalProgram:
    """The instructions of a layer with a strategy applied.

    Args:
        local: the layer.
        arrival_times: per input, its placement in time as it arrives; by default inputs of the model arrive whole,
            others as all their readers in the layer want them.

    Raises:
        PlanMismatchError: microbatches would need a movement between each other, or a layout does not divide.
    """
    times = [_read_time(local, name) for name in local.layer.inputs] if arrival_times is None else arrival_times
    builder = _Builder(local)
    inputs = [
        builder.arrive(name, layout, time)
        for name, layout, time in zip(local.layer.inputs, local.arrivals, times, strict=True)
    ]
    state = [builder.arrive(name, builder.state_layout(name), REPLICATE) for name in local.layer.state]
    for name in (*local.layer.inputs, *local.layer.state):
        builder.take_microbatch(name)
    for index, op in enumerate(local.layer.ops):
        builder.run(index, op)
    outputs = [builder.leave(name, layout) for name, layout in zip(local.layer.outputs, local.departures, strict=True)]
    whole = LocalProgram(
        tuple(builder.values), tuple(inputs), tuple(state), tuple(builder.instructions), tuple(outputs)
    )  # fmt: skip
    return in_parts(in_pieces(whole, local.layer.name, local.pieces, local.recompute))


def _read_time(local: PlacedLayer, name: str) -> Placement:
    """How an input arrives in time, as far as the layer alone can tell."""
    if name in local.program.inputs:
        return REPLICATE
    times = [local.view.operands[op][mention] for op, mention in local.flows[name].readers]
    # What carries a gradient can't be cut, so whoever made it gives what the readers want.
    return times[0] if times and name in local.program.with_gradient else local.view.values[name]


class _Builder:
    """The instructions so far, and where each value is."""

    def __init__(self, local: PlacedLayer) -> None:
        self.local = local
        self.view = local.view
        self.values: list[LocalValue] = []
        self.instructions: list[Single] = []
        self.produced: dict[str, int] = {}
        self.copies: dict[str, int] = {}

    def arrive(self, name: str, layout: Layout, time: Placement) -> int:
        self.produced[name] = self._new(self.local.program.values[name], layout, time)
        return self.produced[name]

    def state_layout(self, name: str) -> Layout:
        """The copy layout, but whole in the dim in which microbatches are taken first."""
        time = self.view.values[name]
        stored = self.local.storage[self.local.flows[name].producer]
        copy = self.local.copies.get(name, stored)
        return tuple(REPLICATE if time.is_shard and p == time else p for p in copy)

    def take_microbatch(self, name: str) -> None:
        """Take the microbatch of what arrives whole before it goes to its copy layout, if `TimeView` says so."""
        time = self.view.values[name]
        if time.is_shard and self.values[self.produced[name]].time != time:
            self.produced[name] = self._in_time(self.produced[name], time, "copy", 0)

    def run(self, index: int, op: Op) -> None:
        state = self.local.states[index]
        operands: list[int] = []
        for mention, name in enumerate(op.operands):
            place = self._in_time(self._copy(name, index), self.view.operands[index][mention], "operand", index)
            operands.append(self._move(place, state.operands[mention], "operand", index))
        values = self.local.program.values
        results = [
            self._append(LocalValue(values[name], layout, time, tensor))
            for name, layout, time, tensor in zip(
                op.results, state.results, self.view.results[index], state.result_types, strict=True
            )
        ]
        self.produced.update(zip(op.results, results, strict=True))
        self.instructions.append(RunOp(index, self._counting(index, op), state, tuple(operands), tuple(results)))

    def _counting(self, index: int, op: Op) -> Op:
        """The op, told of how many microbatches its own is one, where it takes that for the whole batch."""
        place = family_of(op.target).count_arg
        if place < 0 or not option_of(op, self.view.factors[index]).kernel:
            return op
        return replace(op, args=(*op.args[:place], self.view.num_microbatches, *op.args[place + 1 :]))

    def leave(self, name: str, layout: Layout) -> int:
        end = len(self.local.layer.ops)
        return self._move(self._copy(name, end), layout, "output", end)

    def _copy(self, name: str, before: int) -> int:
        if name not in self.copies:
            self.copies[name] = self._move(self.produced[name], self.local.copies[name], "copy", before)
        return self.copies[name]

    def _move(self, source: int, layout: Layout, purpose: str, before: int) -> int:
        place = self.values[source]
        steps = reshard(place.layout, layout, self.local.mesh)
        if not steps:
            return source
        target = self._new(place.value, layout, place.time)
        tensor = self.view.cut(place.value.type, place.time)
        self.instructions.append(Reshard(source, target, steps, tensor, purpose, before))
        return target

    def _in_time(self, source: int, time: Placement, purpose: str, before: int) -> int:
        """`source` with another placement in time; only what needs no other microbatch is possible."""
        place = self.values[source]
        if place.time == time:
            return source
        value = place.value
        has_gradient = value.name in self.local.program.with_gradient
        is_whole = place.time.kind in "RB"
        if is_whole and time.kind in "RB" and (not has_gradient or value.role == "parameter"):
            return source
        if is_whole and time == PARTIAL and (not has_gradient or place.time == BROADCAST):
            target = self._new(value, place.layout, time)
            self.instructions.append(KeepInFirst(source, target))
            return target
        if not (is_whole and time.is_shard) or has_gradient:
            raise PlanMismatchError(
                f"layer {self.local.layer.name}: microbatches can't convert {value.name} from {place.time} to {time} "
                f"in time, because that needs other microbatches: choose other factors in time for the ops that read "
                "it or make it, or plan again"
            )
        # Time is outside all devices: microbatch m of a shard is not the shard of microbatch m.
        whole = self._move(source, tuple(REPLICATE if p == time else p for p in place.layout), purpose, before)
        target = self._new(value, self.values[whole].layout, time)
        self.instructions.append(TakeMicrobatch(whole, target))
        return target

    def _new(self, value: Value, layout: Layout, time: Placement) -> int:
        tensor = self.view.cut(value.type, time)
        try:
            shape = local_shape(tensor.shape, layout, self.local.mesh)
        except (ValueError, IndexError) as error:
            raise PlanMismatchError(
                f"layer {self.local.layer.name}: {value.name} can't have this layout: {error}"
            ) from error
        return self._append(LocalValue(value, layout, time, TensorType(shape, tensor.dtype)))

    def _append(self, value: LocalValue) -> int:
        self.values.append(value)
        return len(self.values) - 1
