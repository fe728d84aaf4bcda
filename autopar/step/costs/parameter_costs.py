"""The bytes of a parameter on one device, and the seconds of adding up its gradients.

`ParameterBytes` is the one record of bytes that prices, the search and the memory of a step read.

Which of them are there at once follows from the ZeRO level (`ParameterBytes.counted_at`)::

    ZeRO   parameters                       gradients                                 optimizer
    0, 1   stored, and the copy             as the copy's sum, and reduced            stored
    2      stored, and the copy             reduced (one layer's copy in transit)     stored
    3      stored (one layer's in transit)  as 2                                      stored

There is a copy to compute with where a parameter is gathered or cast.  What ops compute is in `layer_tensors.liveness`.

Every microbatch but the first adds its gradients to those that are there (autograd's accumulation): below ZeRO-2 those
of the compute copies, from there on those of the stored parts, after they were reduced.  A sum is priced as the op that
it is, an addition of two tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.placement import Axis, Layout, Step, local_shape
from autopar.plan.prediction import LayerCost
from autopar.program import Op, Program, Ref, TensorType, Value, itemsize_bytes
from autopar.step.costs.optimizer_costs import host_copy_s, optimizer_rate, parameter_step_s
from autopar.step.layer.local_layer import PlacedLayer, SharedStorage
from autopar.step.layer.value_flows import Flow
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec

__all__ = [
    "ParameterBytes",
    "SharedCost",
    "brought_s",
    "gradient_sum_s",
    "gradient_sums_s",
    "layer_parameters",
    "memory_cost",
    "parameter_bytes",
    "shared_costs",
    "shared_parameter_bytes",
]


class CountedBytes(NamedTuple):
    """Bytes of parameters as a search counts them, the fields of `LayerCost` with these names."""

    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    transient_bytes: float = 0.0

    @property
    def static_bytes(self) -> float:
        """What is there throughout training."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def cost(self) -> LayerCost:
        """A layer's cost with nothing else."""
        return LayerCost(**self._asdict())


class ParameterBytes(NamedTuple):  # as `CountedBytes`: a search makes many, and constructors of dataclasses are slow
    """Bytes of one parameter.

    Args:
        stored_bytes: as it is stored between steps.
        copied_bytes: of the copy to compute with; 0 where compute reads what is stored.
        received_bytes: the part of the copy that collectives (or slices) bring.
        sent_bytes: what they take of the storage.
        optimizer_bytes: of the optimizer's state.
        gradient_bytes: of the gradient where the parameter is stored.
        copy_gradient_bytes: of the gradient of what is computed with.
        sum_bytes: the same, in the dtype in which microbatches add up.
        reduced_bytes: the same where collectives reduce it.
        arriving_bytes: what comes of that.
        host_bytes: of parameter, final gradient and state in the host's memory, if they are stored there; the three
            are then not on the device, but for gradients that are not yet final.
        brought_bytes: what is copied from there each time it is unsharded.
        is_cast: whether it is stored in another dtype than it is computed with.
        is_sum_cast: whether its gradient is reduced in another.
        is_reordered: whether what collectives move is not contiguous: slices of inner dims.
        is_scattered: whether each device gets a part of the reduced gradient.
    """

    stored_bytes: float
    copied_bytes: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    gradient_bytes: float = 0.0
    copy_gradient_bytes: float = 0.0
    sum_bytes: float = 0.0
    reduced_bytes: float = 0.0
    arriving_bytes: float = 0.0
    host_bytes: float = 0.0
    brought_bytes: float = 0.0
    is_cast: bool = False
    is_sum_cast: bool = False
    is_reordered: bool = False
    is_scattered: bool = False

    @property
    def is_cast_alone(self) -> bool:
        """Whether its gradient would be reduced where it is, were it not in another dtype."""
        return self.is_sum_cast and not self.is_reordered

    def counted_at(self, zero: int) -> CountedBytes:
        """The bytes that a search counts at this ZeRO level: always, and (`transient_bytes`) while the layer runs."""
        copied_bytes = self.copied_bytes
        own_bytes = self.sum_bytes if self.received_bytes else 0.0
        return CountedBytes(
            parameter_bytes=self.stored_bytes + (copied_bytes if zero < 3 else 0.0),
            gradient_bytes=(0.0 if self.host_bytes else self.gradient_bytes) + (own_bytes if zero < 2 else 0.0),
            optimizer_bytes=self.optimizer_bytes,
            transient_bytes=(copied_bytes if zero == 3 else 0.0)
            + (own_bytes if zero >= 2 else 0.0)
            + self.brought_bytes
            + (self.gradient_bytes if self.host_bytes else 0.0),
        )


def parameter_bytes(
    dtype: str, stored: float, copied: float, steps: Sequence[Step], *, trains: bool, training: TrainingSpec
) -> ParameterBytes:
    """The bytes of a parameter.

    Args:
        dtype: that it is computed with.
        stored: elements that a device stores.
        copied: elements that it computes with.
        steps: the reshard from the former to the latter.
        trains: whether it has a gradient.
        training: how it is trained.
    """
    compute, storage = itemsize_bytes(dtype), training.storage_itemsize(dtype)
    gradient, computed = (training.gradient_itemsize(dtype), compute) if trains else (0, 0)
    summed = training.sum_itemsize(dtype) if trains else 0
    moves = any(step.forward != "none" for step in steps)
    reduces = any(step.backward != "none" for step in steps)
    there = training.host_storage
    states = stored * training.optimizer_state_bytes_per_element if trains else 0.0
    return ParameterBytes(
        stored_bytes=0.0 if there else float(stored * storage),
        copied_bytes=float(copied * compute) if moves or storage != compute or there else 0.0,
        received_bytes=float(copied * compute) if moves else 0.0,
        sent_bytes=float(stored * compute) if moves else 0.0,
        optimizer_bytes=0.0 if there else states,
        gradient_bytes=float(stored * gradient),
        host_bytes=stored * (storage + gradient) + states if there else 0.0,
        brought_bytes=float(stored * storage) if there else 0.0,
        copy_gradient_bytes=float(copied * computed),
        sum_bytes=float(copied * summed),
        reduced_bytes=float(copied * summed) if reduces else 0.0,
        arriving_bytes=float(stored * summed) if reduces else 0.0,
        is_cast=storage != compute,
        is_sum_cast=trains and summed != computed,
        is_reordered=any(max(step.src.dim, step.dst.dim) > 0 for step in steps),
        is_scattered=trains and any(step.backward == "reduce_scatter" for step in steps),
    )


def shared_parameter_bytes(
    value: Value, where: tuple[tuple[int, ...], Layout], training: TrainingSpec
) -> ParameterBytes:
    """The cost of a shared parameter's storage, without the copies of the layers that read it."""
    stored = math.prod(local_shape(value.type.shape, where[1], where[0]))
    trains = value.requires_grad and training.is_training
    return parameter_bytes(value.type.dtype, stored, stored, (), trains=trains, training=training)


def layer_parameters(placed: PlacedLayer, training: TrainingSpec) -> Iterator[tuple[Flow, ParameterBytes]]:
    """The parameters of a layer, those in shared storage too; `training` is the layer's own."""
    for flow in placed.flows.values():
        if flow.is_parameter:
            value, shape = flow.value, flow.value.type.shape
            mesh, layout = placed.shared.get(value.name, (placed.mesh, placed.storage[flow.producer]))
            stored = copied = math.prod(local_shape(shape, layout, mesh))
            if flow.readers:
                copied = math.prod(local_shape(shape, placed.copies[value.name], placed.mesh))
            steps = placed.to_copy(flow) if flow.readers else ()
            trains = value.requires_grad and training.is_training
            yield flow, parameter_bytes(value.type.dtype, stored, copied, steps, trains=trains, training=training)


def memory_cost(placed: PlacedLayer, training: TrainingSpec) -> LayerCost:
    """The bytes of what the layer holds, as a search counts them; `training` is the layer's own.

    Buffers and constants are counted as they are stored.  Of parameters in shared storage, which the plan counts once,
    only the layer's copy is counted.
    """
    others = (flow for flow in placed.flows.values() if flow.source == "state" and not flow.is_parameter)
    sizes = (placed.local_bytes(flow.value.type, placed.storage[flow.producer]) for flow in others)
    total = CountedBytes(sum(sizes, 0.0))
    for flow, part in layer_parameters(placed, training):
        counted = part.counted_at(placed.zero)
        if flow.value.name in placed.shared:
            where = placed.shared[flow.value.name]
            counted = _without_shared(counted, shared_parameter_bytes(flow.value, where, training).counted_at(0))
        total = CountedBytes(*map(operator.add, total, counted))
    return total.cost


def _without_shared(counted: CountedBytes, shared: CountedBytes) -> CountedBytes:
    return CountedBytes(
        parameter_bytes=max(0.0, counted.parameter_bytes - shared.parameter_bytes),
        gradient_bytes=max(0.0, counted.gradient_bytes - shared.gradient_bytes),
        transient_bytes=counted.transient_bytes,
    )


def brought_s(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> float:
    """Seconds to copy a layer's parameters to the device once, from the host's memory if they are stored there."""
    if not training.host_storage:
        return 0.0
    parts = (part for _, part in layer_parameters(placed, training))
    return sum(host_copy_s(part.brought_bytes, prices, training) for part in parts)


_SUM = Op("sum_of_gradients", "aten.add.Tensor", (Ref("total"), Ref("gradient")), (), ("total",))


def gradient_sum_s(
    value: Value,
    copy: tuple[tuple[int, ...], Layout],
    stored: tuple[tuple[int, ...], Layout],
    zero: int,
    num_microbatches: int,
    prices: Prices,
    training: TrainingSpec,
) -> float:
    """Seconds per step to add up the gradients of one parameter that is trained.

    Args:
        value: the parameter.
        copy: mesh and layout of the layer's copy.
        stored: mesh and layout of its storage.
        zero: the layer's ZeRO level.
        num_microbatches: of the step.
        prices: of ops.
        training: says how wide gradients are.

    Raises:
        MissingPriceError: an addition in this dtype has no price.
    """
    if num_microbatches == 1:
        return 0.0
    mesh, layout = copy if zero < 2 else stored
    dtype = value.type.dtype
    summed = training.sum_itemsize(dtype) if zero < 2 else training.gradient_itemsize(dtype)
    if summed != itemsize_bytes(dtype):
        dtype = training.gradient_dtype if zero < 2 and training.gradient_dtype else "float32"
    total = TensorType(local_shape(value.type.shape, layout, mesh), dtype)
    if not math.prod(total.shape):
        return 0.0
    time = prices.op_s(_SUM, (total, total), (total,), differentiable=False)
    return (num_microbatches - 1) * time.forward_s


def gradient_sums_s(placed: PlacedLayer, num_microbatches: int, prices: Prices, training: TrainingSpec) -> float:
    """Seconds per step to add up the gradients of all parameters of a layer; `training` is the layer's own."""
    seconds = 0.0
    for flow in placed.read_flows():
        value = flow.value
        if flow.is_parameter and flow.readers and value.requires_grad and training.is_training:
            stored = placed.shared.get(value.name, (placed.mesh, placed.storage[flow.producer]))
            copy = placed.mesh, placed.copies[value.name]
            seconds += gradient_sum_s(value, copy, stored, placed.zero, num_microbatches, prices, training)
    return seconds


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
    costs: dict[str, SharedCost] = {}
    for name, (mesh, layout) in shared.items():
        value = program.values[name]
        trains = value.requires_grad and training.is_training
        own = shared_parameter_bytes(value, (mesh, layout), training)
        step_s = exchange_s = 0.0
        if trains:
            rate = optimizer_rate(program, value.type.dtype, num_devices, prices, training)
            step_s = parameter_step_s(value, mesh, layout, rate, prices, training)
            if num_groups > 1:
                exchange_s = prices.collective_s("send", Axis(num_groups, num_devices), own.gradient_bytes)
        costs[name] = SharedCost(step_s, own.counted_at(0).cost, exchange_s)
    return costs
