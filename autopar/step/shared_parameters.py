"""What parameters cost that layers of several places read, and that are stored once for the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.placement import Axis, local_shape
from autopar.prediction import LayerCost
from autopar.program import Program
from autopar.step.layer_cost import TrainingSpec, optimizer_s_per_element
from autopar.step.local_layer import SharedStorage
from autopar.step.parameter_bytes import shared_parameter_bytes
from autopar.step.prices import Prices

__all__ = ["SharedCost", "shared_costs"]


@dataclass(frozen=True)
class SharedCost:
    """What a parameter that several layers read takes on a device group with such a layer: optimizer seconds, memory,
    and the seconds to send its gradient to one other group.
    """

    step_s: float
    memory: LayerCost
    exchange_s: float


def shared_costs(
    program: Program, shared: SharedStorage, prices: Prices, training: TrainingSpec, num_devices: int, num_groups: int
) -> dict[str, SharedCost]:
    """What each shared parameter takes on a device group (of `num_devices`) that reads it."""
    found: dict[str, SharedCost] = {}
    for name, (mesh, layout) in shared.items():
        value = program.values[name]
        dtype = value.type.dtype
        stored = math.prod(local_shape(value.type.shape, layout, mesh))
        trains = value.requires_grad and training.is_training
        own = shared_parameter_bytes(value, (mesh, layout), training)
        step_s = exchange_s = 0.0
        if trains:
            step_s = stored * optimizer_s_per_element(program, dtype, num_devices, prices, training)
            step_s += prices.optimizer_tensor_s
            if num_groups > 1:
                exchange_s = prices.collective_s("send", Axis(num_groups, num_devices), own.gradient_bytes)
        found[name] = SharedCost(step_s, own.held(0), exchange_s)
    return found
