"""What a device does in each layer kind: arithmetic, bytes and seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.explain.planner import Answer
from autopar.ops import Work, count_work
from autopar.plan import PlannedLayer
from autopar.step.costs.op_seconds import fused_kernels, op_seconds
from autopar.step.layer.local_layer import SharedStorage, place
from autopar.step.layer.planned_layers import own_strategy
from autopar.step.training import is_differentiable

__all__ = ["KindWork", "kind_works", "roofs"]


@dataclass(frozen=True)
class KindWork:
    """The ops of all layers of one kind on one device in one step, forward and backward, without collectives.

    Args:
        layers: their names.
        flops: multiplications and additions.
        num_bytes: what they read and write.
        seconds: what that is priced at.
        dtype: what most arithmetic is done in.
    """

    layers: tuple[str, ...]
    flops: float
    num_bytes: float
    seconds: float
    dtype: str

    @property
    def intensity(self) -> float:
        """Flops per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """The rate that is reached."""
        return self.flops / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class _PricedOp:
    work: Work
    seconds: float
    is_differentiable: bool


def kind_works(answer: Answer) -> tuple[KindWork, ...]:
    """The work of each layer kind under each of its strategies, in the plan's order."""
    results: list[KindWork] = []
    for index, names in _by_strategy(answer.plan.layers).items():
        flops = num_bytes = seconds = 0.0
        by_dtype: dict[str, float] = {}
        for op in _priced_ops(answer, index):
            both = op.is_differentiable
            own = op.work.flops + (op.work.backward_flops if both else 0.0)
            flops += own
            by_dtype[op.work.dtype] = by_dtype.get(op.work.dtype, 0.0) + own
            num_bytes += op.work.num_bytes + (op.work.backward_num_bytes if both else 0.0)
            seconds += op.seconds
        count = len(names) * answer.plan.num_microbatches
        dtype = max(by_dtype, key=lambda name: by_dtype[name], default="float32")
        results.append(KindWork(names, count * flops, count * num_bytes, count * seconds, dtype))
    return tuple(results)


def roofs(answer: Answer, dtype: str) -> tuple[float, float]:
    """What a device can do at most: flops per second in `dtype` (0.0: unknown), bytes per second."""
    device = answer.question.cluster.device
    return device.flops_per_s.get(dtype, 0.0), device.memory_bytes_per_s


def _by_strategy(layers: tuple[PlannedLayer, ...]) -> Mapping[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for layer in layers:
        names[layer.strategy] = (*names.get(layer.strategy, ()), layer.name)
    return names


def _priced_ops(answer: Answer, index: int) -> Iterator[_PricedOp]:
    """The ops of a layer with strategy `index`, for one microbatch on one device."""
    program, plan, training = answer.program, answer.plan, answer.training
    number = next(number for number, layer in enumerate(plan.layers) if layer.strategy == index)
    layer = program.layers[number]
    strategy = own_strategy(program, layer, plan.strategies[index])
    placed = place(program, layer, strategy, plan.num_microbatches, _shared(answer))
    kernels = fused_kernels(placed, training)
    joined = {index for kernel in kernels for index in kernel.ops}
    for index, (op, time) in enumerate(zip(layer.ops, op_seconds(placed, answer.prices, training), strict=True)):
        state = placed.states[index]
        work = count_work(op, state.work_types, state.result_types)
        if index in joined and not work.is_counted_in_flops:
            work = Work("bytes", work.dtype)
        yield _PricedOp(work, time.forward_s + time.backward_s, is_differentiable(program, op, training))
    for kernel in kernels:
        work = Work("bytes", "uint8", read_bytes=kernel.read_bytes, write_bytes=kernel.write_bytes)
        yield _PricedOp(work, 0.0, False)  # its seconds are those of its ops


def _shared(answer: Answer) -> SharedStorage:
    values = {name: value for value, name in answer.program.parameters.items()}
    return {values[name]: (answer.plan.shared_mesh, layout) for name, layout in answer.plan.shared_storage}
