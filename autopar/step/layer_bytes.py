"""What a layer of a plan holds on one device, part by part: the numbers that the memory of a step adds up."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.step.layer_cost import own_training
from autopar.step.liveness import RunningMemory, running_memory
from autopar.step.local_layer import PlacedLayer
from autopar.step.parameter_bytes import layer_parameters
from autopar.step.training import TrainingSpec
from autopar.step.value_flows import Flow

__all__ = ["LayerBytes", "layer_bytes"]


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer; of those of its parameters, sums of what `ParameterBytes` says.

    Args:
        running: what one microbatch takes.
        stored: per parameter, buffer and constant (by name in the layer), its storage; of parameters that several
            layers share, nothing here.
        optimizer_bytes: of the optimizer's state, those of shared parameters apart.
        largest_bytes: the largest trained parameter as it is stored, for an optimizer that steps one after the other.
        copied_bytes: the copies to compute with.
        received_bytes: the part of them that collectives bring.
        sent_bytes: of what is put into a buffer of its own to be gathered.
        taken_apart_bytes: the part of `received_bytes` that is copied out of the buffer in which it came.
        gradient_bytes: gradients where parameters are stored, those of shared parameters apart.
        copy_gradient_bytes: gradients of what is computed with.
        sum_bytes: the same, in the dtype in which microbatches add them up.
        reduced_bytes: the part of `copy_gradient_bytes` that collectives reduce.
        packed_bytes: the part of that which is put into a buffer of its own to be reduced.
        scattered_bytes: the part of which every device gets a part; it is there until that has come.
        arriving_bytes: what comes of reductions.
    """

    running: RunningMemory
    stored: tuple[tuple[str, float], ...]
    optimizer_bytes: float = 0.0
    largest_bytes: float = 0.0
    copied_bytes: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    taken_apart_bytes: float = 0.0
    gradient_bytes: float = 0.0
    copy_gradient_bytes: float = 0.0
    sum_bytes: float = 0.0
    reduced_bytes: float = 0.0
    packed_bytes: float = 0.0
    scattered_bytes: float = 0.0
    arriving_bytes: float = 0.0

    @property
    def coming_bytes(self) -> float:
        """What its gathers take while they are under way."""
        return self.sent_bytes + self.received_bytes


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
        largest_bytes=max((part.stored_bytes for part in parts if part.optimizer_bytes), default=0.0),
        copied_bytes=sum(part.copied_bytes for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        sent_bytes=sum(part.sent_bytes for part in gathered if len(gathered) > 1 or part.is_cast),
        taken_apart_bytes=sum(part.received_bytes for part in gathered if len(gathered) > 1 or part.is_reordered),
        gradient_bytes=sum(part.gradient_bytes for part in own),
        copy_gradient_bytes=sum(part.copy_gradient_bytes for part in parts),
        sum_bytes=sum(part.sum_bytes for part in parts),
        reduced_bytes=sum(part.reduced_bytes for part in parts),
        packed_bytes=sum(part.reduced_bytes for part in reduced if len(reduced) > 1 or part.is_reordered),
        scattered_bytes=sum(part.reduced_bytes for part in reduced if part.is_scattered),
        arriving_bytes=sum(part.arriving_bytes for part in reduced),
    )


def _other_bytes(placed: PlacedLayer, flow: Flow) -> float:
    """Of a buffer, which is whole, or of a constant, of which there is the part that is computed with."""
    if flow.value.role == "buffer":
        return float(flow.value.type.num_bytes)
    layout = placed.copies[flow.value.name] if flow.readers else placed.storage[flow.producer]
    return placed.local_bytes(flow.value.type, layout)
