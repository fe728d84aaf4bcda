"""What a layer of a plan holds on one device, part by part: the numbers that a walk through a step adds up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.placement import local_shape
from autopar.program import Layer, Program, itemsize_bytes
from autopar.step.layer_cost import own_training
from autopar.step.liveness import RunningMemory, running_memory
from autopar.step.local_layer import PlacedLayer
from autopar.step.training import TrainingSpec
from autopar.step.value_flows import Flow

__all__ = ["Holdings", "layer_holdings"]


@dataclass(frozen=True)
class Holdings:
    """Bytes of one layer.

    Args:
        running: what one microbatch takes.
        stored: per held value (by name in the first layer of the kind), where it is stored between steps; of parameters
            that several layers share, 0 here.
        optimizer_bytes: of the optimizer's state.
        largest_bytes: the largest trained parameter as it is stored, for an optimizer that steps one after the other.
        copied_bytes: the copies to compute with, of parameters that are gathered or cast.
        received_bytes: the part of them that collectives bring.
        sent_bytes: of what is put into a buffer of its own to be gathered.
        taken_apart_bytes: the part of `received_bytes` that is copied out of the buffer in which it came.
        gradient_bytes: gradients where parameters are stored.
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


def layer_holdings(placed: PlacedLayer, training: TrainingSpec) -> Holdings:
    """What the layer of `placed` holds."""
    training = own_training(placed.program, placed.layer, training)
    running = running_memory(placed, (placed.recompute,), training)[placed.recompute]
    parts = [_parameter(placed, flow, training) for flow in placed.flows.values() if flow.is_parameter]
    gathered = [part for part in parts if part.received]
    reduced = [part for part in parts if part.reduced]
    others = [
        (flow.value.name, float(flow.value.type.num_bytes if flow.value.role == "buffer" else _local(placed, flow)))
        for flow in placed.flows.values()
        if flow.source == "held" and not flow.is_parameter
    ]
    return Holdings(
        running,
        (*((part.name, part.stored) for part in parts if part.name not in placed.shared), *others),
        sum(part.optimizer for part in parts if part.name not in placed.shared),
        max((part.stored for part in parts if part.optimizer), default=0.0),
        sum(part.copied for part in parts),
        sum(part.received for part in parts),
        sum(part.sent for part in gathered if len(gathered) > 1 or part.is_cast),
        sum(part.received for part in gathered if len(gathered) > 1 or part.is_reordered),
        sum(part.gradient for part in parts if part.name not in placed.shared),
        sum(part.copy_gradient for part in parts),
        sum(part.total for part in parts),
        sum(part.reduced for part in parts),
        sum(part.reduced for part in reduced if len(reduced) > 1 or part.is_reordered),
        sum(part.reduced for part in reduced if part.is_scattered),
        sum(part.arriving for part in reduced),
    )


@dataclass(frozen=True)
class _Parameter:
    name: str
    stored: float
    copied: float
    received: float
    sent: float
    is_cast: bool
    is_reordered: bool
    optimizer: float = 0.0
    gradient: float = 0.0
    copy_gradient: float = 0.0
    total: float = 0.0
    reduced: float = 0.0
    is_scattered: bool = False
    arriving: float = 0.0


def _local(placed: PlacedLayer, flow: Flow) -> float:
    layout = placed.copies[flow.value.name] if flow.readers else placed.storage[flow.producer]
    return placed.local_bytes(flow.value.type, layout)


def _parameter(placed: PlacedLayer, flow: Flow, training: TrainingSpec) -> _Parameter:
    value, dtype = flow.value, flow.value.type.dtype
    mesh, layout = placed.shared.get(value.name, (placed.mesh, placed.storage[flow.producer]))
    stored = math.prod(local_shape(value.type.shape, layout, mesh))
    copied = (
        math.prod(local_shape(value.type.shape, placed.copies[value.name], placed.mesh)) if flow.readers else stored
    )
    steps = placed.to_copy(flow) if flow.readers else ()
    storage, compute = training.storage_itemsize(dtype), itemsize_bytes(dtype)
    moves = any(step.forward != "none" for step in steps)
    copy_bytes = float(copied * compute) if moves or storage != compute else 0.0
    moved = (
        copy_bytes if moves else 0.0,
        float(stored * compute) if moves else 0.0,
        storage != compute,
        any(max(step.src.dim, step.dst.dim) > 0 for step in steps),
    )
    if not (value.requires_grad and training.is_training):
        return _Parameter(value.name, stored * storage, copy_bytes, *moved)
    itemsize = training.gradient_itemsize(dtype)
    reduces = any(step.backward != "none" for step in steps)
    return _Parameter(
        value.name, stored * storage, copy_bytes, *moved, stored * training.optimizer_state_bytes_per_element,
        stored * itemsize, copied * compute, copied * max(itemsize, compute), copied * compute if reduces else 0.0,
        any(step.backward == "reduce_scatter" for step in steps), stored * compute if reduces else 0.0,
    )  # fmt: skip


def first_of_kind(program: Program, layer: Layer) -> Layer:
    """The first layer that is like `layer`."""
    return program.kinds[layer.kind]
