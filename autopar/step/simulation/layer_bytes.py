"""What a layer of a plan holds on one device, part by part: the numbers that a step's memory adds up; and the tensors
by which it meets other layers: what it reads, saves for backward and puts out.

A value that one layer puts out and others read is one tensor as long as nobody reshards it, so a step that counts it
for each of them would count it several times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.program import Program
from autopar.step.costs.optimizer_costs import updated_parameters, whole_bytes
from autopar.step.costs.parameter_costs import layer_parameters
from autopar.step.layer.boundary_values import sent_values
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.layer.value_flows import Flow
from autopar.step.layer_tensors.liveness import RunningMemory, input_key, running_memory
from autopar.step.training import TrainingSpec, own_training

__all__ = ["LayerBytes", "LayerOutput", "LayerTensors", "StepTensors", "layer_bytes", "step_tensors"]


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer; of those of its parameters, sums of what `ParameterBytes` says.

    Args:
        running: the bytes of one microbatch.
        stored: per parameter, buffer and constant (by name in the layer), its storage; of parameters that several
            layers share, nothing here.
        optimizer_bytes: of the optimizer's state, those of shared parameters apart.
        largest_bytes: the largest trained parameter as it is stored, for an optimizer that steps one after the other.
        whole_bytes: bytes that are gathered for an optimizer of whole parameters, without shared ones.
        copied_bytes: the copies to compute with.
        received_bytes: the part of them that collectives bring.
        brought_bytes: what is copied from the host's memory to be gathered, or computed with.
        host_bytes: of parameters, gradients and states that are stored there, those of shared parameters apart.
        sent_bytes: of what is put into a buffer of its own to be gathered.
        taken_apart_bytes: the part of `received_bytes` that is copied out of the buffer in which it came.
        gradient_bytes: gradients where parameters are stored, those of shared parameters apart.
        copy_gradient_bytes: gradients of what is computed with.
        sum_bytes: the same, in the dtype in which microbatches add them up.
        reduced_bytes: the part of `sum_bytes` that collectives reduce.
        packed_bytes: the part of that which is put into a buffer of its own to be reduced.
        cast_bytes: the part that is put into one only because it is reduced in another dtype than it was computed in.
        scattered_bytes: the part of which every device gets a part; it is there until that has come.
        arriving_bytes: what comes of reductions.
    """

    running: RunningMemory
    stored: tuple[tuple[str, float], ...]
    optimizer_bytes: float = 0.0
    largest_bytes: float = 0.0
    whole_bytes: float = 0.0
    copied_bytes: float = 0.0
    received_bytes: float = 0.0
    brought_bytes: float = 0.0
    host_bytes: float = 0.0
    sent_bytes: float = 0.0
    taken_apart_bytes: float = 0.0
    gradient_bytes: float = 0.0
    copy_gradient_bytes: float = 0.0
    sum_bytes: float = 0.0
    reduced_bytes: float = 0.0
    packed_bytes: float = 0.0
    cast_bytes: float = 0.0
    scattered_bytes: float = 0.0
    arriving_bytes: float = 0.0

    @property
    def coming_bytes(self) -> float:
        """What its gathers take while they are under way."""
        return self.sent_bytes + self.received_bytes + self.brought_bytes


def layer_bytes(placed: PlacedLayer, training: TrainingSpec) -> LayerBytes:
    """What the layer of `placed` holds."""
    training = own_training(placed.program, placed.layer, training)
    named = [(flow.value.name, part) for flow, part in layer_parameters(placed, training)]
    parts = [part for _, part in named]
    own = [part for name, part in named if name not in placed.shared]
    gathered = [part for part in parts if part.received_bytes]
    reduced = [part for part in parts if part.reduced_bytes]
    others = (flow for flow in placed.flows.values() if flow.source == "state" and not flow.is_parameter)
    return LayerBytes(
        running=running_memory(placed, (placed.recompute,), training)[placed.recompute],
        stored=(
            *((name, part.stored_bytes) for name, part in named if name not in placed.shared),
            *((flow.value.name, _other_bytes(placed, flow)) for flow in others),
        ),
        optimizer_bytes=sum(part.optimizer_bytes for part in own),
        largest_bytes=max(
            (max(part.stored_bytes, part.brought_bytes) for part in parts if part.gradient_bytes), default=0.0
        ),
        whole_bytes=sum(whole_bytes(v, placed.mesh, at, training) for v, at in updated_parameters(placed, training)),
        copied_bytes=sum(part.copied_bytes for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        brought_bytes=sum(part.brought_bytes for part in parts),
        host_bytes=sum(part.host_bytes for part in own),
        sent_bytes=sum(part.sent_bytes for part in gathered if len(gathered) > 1 or part.is_cast),
        taken_apart_bytes=sum(part.received_bytes for part in gathered if len(gathered) > 1 or part.is_reordered),
        gradient_bytes=sum(part.gradient_bytes for part in own),
        copy_gradient_bytes=sum(part.copy_gradient_bytes for part in parts),
        sum_bytes=sum(part.sum_bytes for part in parts),
        reduced_bytes=sum(part.reduced_bytes for part in parts),
        packed_bytes=sum(part.reduced_bytes for part in reduced if len(reduced) > 1 or part.is_reordered),
        cast_bytes=sum(part.reduced_bytes for part in reduced if len(reduced) == 1 and part.is_cast_alone),
        scattered_bytes=sum(part.reduced_bytes for part in reduced if part.is_scattered),
        arriving_bytes=sum(part.arriving_bytes for part in reduced),
    )


def _other_bytes(placed: PlacedLayer, flow: Flow) -> float:
    """Of a buffer, which is whole, or of a constant, of which there is the part that is computed with."""
    if flow.value.role == "buffer":
        return float(flow.value.type.num_bytes)
    layout = placed.copies[flow.value.name] if flow.readers else placed.storage[flow.producer]
    return placed.local_bytes(flow.value.type, layout)


# A tensor of one microbatch: the index of the layer that made it, and its key in that layer's `RunningMemory`.
Tensor = tuple[int, str]


class LayerOutput(NamedTuple):
    """A value that a layer puts out, and the bytes of its gradient (0: it gets none)."""

    tensor: Tensor
    num_bytes: float
    gradient_bytes: float


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer in one microbatch.

    Args:
        outputs: by name.
        saved: what it saves for backward and other layers may keep as well, with bytes.
        inside_bytes: what else it saves.
        own_saved_bytes: what it saves, its inputs apart.
        resharded_bytes: of its inputs, those that are resharded for it.
        trained_inputs: the inputs that get gradients from its backward.
    """

    outputs: Mapping[str, LayerOutput]
    saved: tuple[tuple[Tensor, float], ...]
    inside_bytes: float
    own_saved_bytes: float
    resharded_bytes: float
    trained_inputs: tuple[str, ...]


@dataclass(frozen=True)
class StepTensors:
    """The tensors of a step.

    Args:
        layers: of each layer.
        outputs: by name, of all layers.
        last_reads: per layer, the names of the values that nobody reads after its forward.
        sent: per stage, the names of the values that it sends to the next one.
        losses: per stage, what it makes of the loss.
        returned: the names of the values that the caller gets.
    """

    layers: tuple[LayerTensors, ...]
    outputs: Mapping[str, LayerOutput]
    last_reads: tuple[tuple[str, ...], ...]
    sent: tuple[tuple[str, ...], ...]
    losses: tuple[tuple[str, ...], ...]
    returned: frozenset[str]

    def received(self, stage: int) -> tuple[str, ...]:
        """The names of the values that a stage gets from the one before."""
        return self.sent[stage - 1] if stage else ()


def step_tensors(layers: PlannedLayers, sizes: Sequence[LayerBytes]) -> StepTensors:
    """The tensors of a plan's step; `sizes` has the bytes of each layer."""
    outputs = {
        name: LayerOutput((index, key), num_bytes, gradient_bytes)
        for index, layer in enumerate(layers.program.layers)
        for name, (key, num_bytes, gradient_bytes) in zip(layer.outputs, sizes[index].running.outputs, strict=True)
    }
    arriving = _arriving_tensors(layers, outputs)
    tensors = tuple(
        _layer_tensors(layers, index, sizes[index].running, outputs, arriving[index])
        for index in range(len(layers.program.layers))
    )
    program, ranges = layers.program, layers.decisions.ranges
    returned = frozenset({*program.outputs, *program.whole_results})
    made_in = {name: index for index, layer in enumerate(program.layers) for name in layer.outputs}
    trained = [name for name in program.loss_terms if program.values[name].requires_grad]
    losses = tuple(tuple(name for name in trained if made_in.get(name) in own) for own in ranges)
    return StepTensors(tensors, outputs, _last_reads(program, returned), _sent(layers), losses, returned)


def _layer_tensors(
    layers: PlannedLayers,
    index: int,
    running: RunningMemory,
    outputs: Mapping[str, LayerOutput],
    arriving: Mapping[str, Tensor],
) -> LayerTensors:
    layer = layers.program.layers[index]
    named = zip(layers.placed[index].layer.inputs, layer.inputs, strict=True)
    inputs = {input_key(first): arriving.get(name, (index, input_key(first))) for first, name in named}
    shared = inputs | {key: (index, key) for key, _, _ in running.outputs}
    saved = [(shared[key], num_bytes) for key, num_bytes in running.saved.items() if key in shared]
    in_order = zip(running.inputs.values(), inputs.values(), strict=True)
    return LayerTensors(
        outputs={name: outputs[name] for name in layer.outputs},
        saved=tuple(saved),
        inside_bytes=running.saved_bytes - sum(num_bytes for _, num_bytes in saved),
        own_saved_bytes=running.saved_bytes - sum(running.saved.get(key, 0.0) for key in inputs),
        resharded_bytes=sum(num_bytes for num_bytes, (maker, _) in in_order if maker == index),
        trained_inputs=tuple(
            name for name in layer.inputs if layers.program.values[name].requires_grad and name in outputs
        ),
    )


def _arriving_tensors(layers: PlannedLayers, outputs: Mapping[str, LayerOutput]) -> list[dict[str, Tensor]]:
    """Per layer, the inputs that are read as they were put out."""
    arriving: list[dict[str, Tensor]] = [{} for _ in layers.program.layers]
    for crossing in layers.crossings:
        source, target = layers.strategies[crossing.producer], layers.strategies[crossing.reader]
        if (source.mesh, source.outputs[crossing.output]) == (target.mesh, target.inputs[crossing.input]):
            arriving[crossing.reader][crossing.value] = outputs[crossing.value].tensor
    return arriving


def _last_reads(program: Program, returned: frozenset[str]) -> tuple[tuple[str, ...], ...]:
    last_reader = {name: index for index, layer in enumerate(program.layers) for name in layer.inputs}
    return tuple(
        tuple(
            name
            for name in (*layer.inputs, *layer.outputs)
            if last_reader.get(name, -1) <= index and name not in returned
        )
        for index, layer in enumerate(program.layers)
    )


def _sent(layers: PlannedLayers) -> tuple[tuple[str, ...], ...]:
    starts = [own.start for own in layers.decisions.ranges]
    sent: list[list[str]] = [[] for _ in starts]
    for value in sent_values(layers.crossings, starts, layers.strategies) if layers.decisions.stages else ():
        sent[value.stage].append(value.crossing.value)
    return tuple(map(tuple, sent))
