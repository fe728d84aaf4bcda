"""Seconds of an optimizer's step on one device.

An optimizer that works element by element updates the parts that the device stores.  One that needs whole parameters
(`TrainingSpec.takes_whole`) has those that are cut gathered before its step: the parameter, its gradient, and the
states of its shape (`autopar.lower.parameters.whole_matrices`), and every device then updates all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from autopar.placement import REPLICATE, Layout, local_shape, reshard
from autopar.program import Program, Value
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer.value_flows import Flow
from autopar.step.prices import Prices, reshard_calls
from autopar.step.training import TrainingSpec

__all__ = [
    "OptimizerRate", "gather_s", "host_copy_s", "layer_gathers_s", "optimizer_rate", "optimizer_s", "parameter_step_s",
    "updated_parameters", "updates", "whole_bytes",
]  # fmt: skip


class OptimizerRate(NamedTuple):
    """Seconds of an optimizer's step on a part of the parameters.

    Args:
        updated_s: for each element that a device updates.
        launch_s: for each element of the parameter, however much of it a device updates: the kernels' launches, of
            which there are as many for a part of all parameters as for all of them, shared out over the parameters.
    """

    updated_s: float
    launch_s: float = 0.0


def optimizer_rate(
    program: Program, dtype: str, num_devices: int, prices: Prices, training: TrainingSpec
) -> OptimizerRate:
    """The rate of an optimizer on parameters of this dtype.

    An optimizer works on all parameters of a device at once, so its price is not a sum of prices per
    parameter.  The rate is that of a device which stores an equal share of the whole program.
    """
    rate, traffic_bytes = prices.host.update_bytes_per_s, training.optimizer_traffic_bytes(dtype)
    if training.host_storage and rate:
        return OptimizerRate(traffic_bytes / rate)
    share = max(1.0, program.num_trainable_elements / num_devices)
    launch_s = prices.optimizer_s(0.0, traffic_bytes)
    updated_s = (prices.optimizer_s(share, traffic_bytes) - launch_s) / share
    return OptimizerRate(updated_s, launch_s / (share * num_devices))


def parameter_step_s(
    value: Value, mesh: tuple[int, ...], stored: Layout, rate: OptimizerRate, prices: Prices, training: TrainingSpec
) -> float:
    """Seconds of the step on one parameter that is stored so, gathers included.

    Where parameters are stored in the host's memory, these contain the copy of the gradient to there: it begins when
    the gradient is final, and may overlap with what is left of the backward, which is not counted.
    """
    is_gathered = training.takes_whole(value.type.shape, mesh, stored)
    shape = value.type.shape if is_gathered else local_shape(value.type.shape, stored, mesh)
    own = math.prod(local_shape(value.type.shape, stored, mesh))
    sent_s = host_copy_s(own * training.gradient_itemsize(value.type.dtype), prices, training)
    gathered_s = gather_s(value, mesh, stored, prices, training)
    own_s = math.prod(shape) * rate.updated_s + value.type.num_elements * rate.launch_s
    return own_s + prices.optimizer_tensor_s + gathered_s + sent_s


def host_copy_s(num_bytes: float, prices: Prices, training: TrainingSpec) -> float:
    """Seconds to copy so much of one parameter or gradient between the device and where parameters are stored."""
    return prices.host.copy_s(num_bytes, 1) if training.host_storage else 0.0


def gather_s(value: Value, mesh: tuple[int, ...], stored: Layout, prices: Prices, training: TrainingSpec) -> float:
    """Seconds to make a parameter that is stored so whole for the optimizer, with its gradient and states.

    Raises:
        MissingPriceError: a collective has no price.
    """
    if not training.takes_whole(value.type.shape, mesh, stored):
        return 0.0
    steps = reshard(stored, (REPLICATE,) * len(mesh), mesh)
    return sum(
        prices.collective_s(call.kind, call.axis, call.num_bytes)
        for num_bytes in _gathered(value, training)
        for call in reshard_calls(steps, num_bytes, has_gradient=False)
    )


def whole_bytes(value: Value, mesh: tuple[int, ...], stored: Layout, training: TrainingSpec) -> float:
    """Bytes of what `gather_s` gathers."""
    return sum(_gathered(value, training)) if training.takes_whole(value.type.shape, mesh, stored) else 0.0


def _gathered(value: Value, training: TrainingSpec) -> tuple[float, ...]:
    """The bytes of a whole parameter, its gradient, and its states."""
    tensor = value.type
    storage, gradient = training.storage_itemsize(tensor.dtype), training.gradient_itemsize(tensor.dtype)
    itemsizes = (storage, gradient, *(storage,) * training.num_whole_states(tensor.shape))
    return tuple(float(tensor.num_elements * itemsize) for itemsize in itemsizes)


def optimizer_s(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> float:
    """Seconds of the optimizer on the layer's parameters, those in shared storage apart."""
    rates: dict[str, OptimizerRate] = {}
    seconds = 0.0
    for value, stored in updated_parameters(placed, training):
        dtype = value.type.dtype
        if dtype not in rates:
            devices = math.prod(placed.mesh)
            rates[dtype] = optimizer_rate(placed.program, dtype, devices, prices, training)
        seconds += parameter_step_s(value, placed.mesh, stored, rates[dtype], prices, training)
    return seconds


def layer_gathers_s(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> float:
    """The part of `optimizer_s` in which parameters, gradients and states are gathered."""
    updated = updated_parameters(placed, training)
    return sum(gather_s(value, placed.mesh, stored, prices, training) for value, stored in updated)


def updates(flow: Flow, training: TrainingSpec) -> bool:
    """Whether the optimizer updates this value."""
    return flow.is_parameter and flow.value.requires_grad and training.is_training


def updated_parameters(placed: PlacedLayer, training: TrainingSpec) -> Iterator[tuple[Value, Layout]]:
    """The parameters of a layer that the optimizer updates, and how they are stored; those in shared storage apart."""
    for flow in placed.flows.values():
        if updates(flow, training) and flow.value.name not in placed.shared:
            yield flow.value, placed.storage[flow.producer]
