"""The bytes that one layer takes on one device.

========  =======================  ==================================  =========
ZeRO      parameters               gradients                           optimizer
========  =======================  ==================================  =========
0         stored                   as the copy                         stored
1         stored and gathered      as the copy, and reduced            stored
2         stored and gathered      reduced (one layer's in transit)    stored
3         stored (a layer gathered in transit)   as 2                  stored
========  =======================  ==================================  =========

What ops compute is in `autopar.step.liveness`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.placement import local_shape
from autopar.program import Value, itemsize_bytes
from autopar.step.local_layer import PlacedLayer
from autopar.step.training import TrainingSpec
from autopar.step.value_flows import Flow

__all__ = ["ParameterMemory", "held_memory", "parameter_memory"]


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes of parameters, their gradients and optimizer state; `transient_bytes` only while their layer
    runs.
    """

    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    transient_bytes: float = 0.0

    @property
    def persistent_bytes(self) -> float:
        """What is held all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def parameter_memory(
    dtype: str, stored: float, copied: float, zero: int, trainable: bool, training: TrainingSpec
) -> ParameterMemory:
    """Memory of a parameter of which this device stores `stored` elements and computes with `copied`."""
    compute = itemsize_bytes(dtype)
    storage = training.storage_itemsize(dtype)
    needs_copy = copied != stored or storage != compute
    copy_bytes = copied * compute if needs_copy else 0.0
    keeps_copy = zero < 3
    parameter = stored * storage + (copy_bytes if keeps_copy else 0.0)
    transient = 0.0 if keeps_copy else copy_bytes
    if not (trainable and training.is_training):
        return ParameterMemory(parameter, transient_bytes=transient)
    itemsize = training.gradient_itemsize(dtype)
    gradient = stored * itemsize
    if copied != stored:
        if zero >= 2:
            transient += copied * itemsize
        else:
            gradient += copied * itemsize
    return ParameterMemory(parameter, gradient, stored * training.optimizer_state_bytes_per_element, transient)


def held_memory(placed: PlacedLayer, training: TrainingSpec) -> ParameterMemory:
    """The bytes of parameters and what belongs to them; of those in shared storage only what the layer's copy takes."""
    held = [_held_memory(placed, flow, training) for flow in placed.flows.values() if flow.source == "held"]
    return ParameterMemory(
        sum(memory.parameter_bytes for memory in held),
        sum(memory.gradient_bytes for memory in held),
        sum(memory.optimizer_bytes for memory in held),
        sum(memory.transient_bytes for memory in held),
    )


def _held_memory(placed: PlacedLayer, flow: Flow, training: TrainingSpec) -> ParameterMemory:
    value = flow.value
    stored = math.prod(local_shape(value.type.shape, placed.storage[flow.producer], placed.mesh))
    if not flow.is_parameter:
        return ParameterMemory(stored * itemsize_bytes(value.type.dtype))
    if not flow.readers:
        copied = stored
    else:
        copied = math.prod(local_shape(value.type.shape, placed.copies[value.name], placed.mesh))
    if value.name in placed.shared:
        mesh, layout = placed.shared[value.name]
        stored = math.prod(local_shape(value.type.shape, layout, mesh))
        return _copy_memory(value, stored, copied, placed.zero, training)
    return parameter_memory(value.type.dtype, stored, copied, placed.zero, value.requires_grad, training)


def _copy_memory(value: Value, stored: float, copied: float, zero: int, training: TrainingSpec) -> ParameterMemory:
    """What this layer's copy of a parameter in shared storage takes beside that storage, which the plan counts once."""
    both = parameter_memory(value.type.dtype, stored, copied, zero, value.requires_grad, training)
    once = parameter_memory(value.type.dtype, stored, stored, 0, value.requires_grad, training)
    return ParameterMemory(
        max(0.0, both.parameter_bytes - once.parameter_bytes),
        max(0.0, both.gradient_bytes - once.gradient_bytes),
        transient_bytes=both.transient_bytes,
    )
