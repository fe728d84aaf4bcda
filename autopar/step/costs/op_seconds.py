"""Seconds of each op of a layer: run eagerly, or as its share of a fused kernel."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import lru_cache

from autopar.cluster import OpTime
from autopar.program import Op, Ref, TensorType
from autopar.step.layer.local_layer import PlacedLayer
from autopar.step.layer_tensors.fused_kernels import FusedKernel
from autopar.step.layer_tensors.fusion import FusedLayer, fused_layer
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec, is_differentiable, own_training

__all__ = ["fused_kernels", "op_seconds"]

# A kernel that moves bytes: priced as one op on so many of them.
_KERNEL = Op("fused", "autopar.fused", (Ref("x"),), (), ("y",))
_TIMED = ("layers", "scaled")  # sources of prices that come from whole layers, compiled if the run is


@lru_cache(maxsize=64)  # what runs and what it overlaps with are priced one after the other
def op_seconds(placed: PlacedLayer, prices: Prices, training: TrainingSpec) -> tuple[OpTime, ...]:
    """Seconds of every op of a layer under a strategy, for one microbatch.

    Compiled, the seconds of a kernel are shared out among its ops as those of the ops are if they run alone; together
    they are never more.

    Raises:
        MissingPriceError: an op has no price.
    """
    alone = tuple(
        prices.op_s(op, state.work_types, state.result_types, is_differentiable(placed.program, op, training))
        for op, state in zip(placed.layer.ops, placed.states, strict=True)
    )
    if not training.compiled or any(time.source in _TIMED for time in alone):
        return alone
    fused = _fused(placed, training)
    joined = {node.op_index for node in fused.graph.nodes if node.fuses}
    forward_s = _shared_out(fused.forward, joined, [time.forward_s for time in alone], prices)
    backward_s = _shared_out(fused.backward, joined, [time.backward_s for time in alone], prices)
    return tuple(
        OpTime(ahead_s, back_s, time.source) for time, ahead_s, back_s in zip(alone, forward_s, backward_s, strict=True)
    )


def fused_kernels(placed: PlacedLayer, training: TrainingSpec) -> tuple[FusedKernel, ...]:
    """The kernels that a compiler makes of a layer's ops, forward and backward; none if it runs eagerly."""
    if not training.compiled:
        return ()
    fused = _fused(placed, training)
    return (*fused.forward, *fused.backward)


def _fused(placed: PlacedLayer, training: TrainingSpec) -> FusedLayer:
    own = own_training(placed.program, placed.layer, training)
    return fused_layer(placed, fuses_attention=own.fuses_attention, is_training=own.is_training)


def _shared_out(
    kernels: Sequence[FusedKernel], joined: Set[int], alone_s: Sequence[float], prices: Prices
) -> list[float]:
    """The seconds of each op alone, or if it is fused (`joined`), its shares of the kernels that it is in."""
    kernels_s = [_kernel_s(kernel, prices) for kernel in kernels]
    most = sum(alone_s[op] for op in joined)
    scale = min(1.0, most / sum(kernels_s)) if any(kernels_s) else 0.0
    seconds = [0.0 if op in joined else each_s for op, each_s in enumerate(alone_s)]
    for kernel, kernel_s in zip(kernels, kernels_s, strict=True):
        weights = {op: alone_s[op] for op in kernel.ops if op in joined and alone_s[op]} or dict.fromkeys(
            kernel.ops, 1.0
        )
        for op, weight in weights.items():
            seconds[op] += scale * kernel_s * weight / sum(weights.values())
    return seconds


def _kernel_s(kernel: FusedKernel, prices: Prices) -> float:
    read, written = (TensorType((round(size),), "uint8") for size in (kernel.read_bytes, kernel.write_bytes))
    return prices.op_s(_KERNEL, (read,), (written,), differentiable=False).forward_s
