"""What it takes to add up the gradients of a step's microbatches.

Every microbatch but the first adds its gradients to those that are there (autograd's accumulation): below ZeRO-2 those
of the compute copies, from there on those of the stored parts, after they were reduced.  A sum is priced as the op that
it is, an addition of two tensors.
"""

from __future__ import annotations

import math

from autopar.placement import Layout, local_shape
from autopar.program import Op, Ref, TensorType, Value, itemsize_bytes
from autopar.step.local_layer import PlacedLayer
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec

__all__ = ["gradient_sum_s", "gradient_sums_s"]

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
    if training.gradient_itemsize(dtype) != itemsize_bytes(dtype):
        dtype = "float32"
    summed = TensorType(local_shape(value.type.shape, layout, mesh), dtype)
    if not math.prod(summed.shape):
        return 0.0
    time = prices.op_s(_SUM, (summed, summed), (summed,), differentiable=False)
    return (num_microbatches - 1) * time.forward_s


def gradient_sums_s(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> float:
    """Seconds per step to add up the gradients of all parameters of a layer; `training` is the layer's own."""
    seconds = 0.0
    for flow in placed.read_flows():
        value = flow.value
        if flow.is_parameter and flow.readers and value.requires_grad and training.is_training:
            stored = placed.shared.get(value.name, (placed.mesh, placed.storage[flow.producer]))
            copy = placed.mesh, placed.copies[value.name]
            count = placed.view.num_microbatches
            seconds += gradient_sum_s(value, copy, stored, placed.zero, count, prices, training)
    return seconds
