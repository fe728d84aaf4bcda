"""What pipeline stages send to each other."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.placement import local_shape
from autopar.plan import LayerStrategy
from autopar.program import itemsize_bytes
from autopar.schedules import Shape
from autopar.step.boundary_values import BoundaryValue

__all__ = ["SentValue", "layer_groups", "sent_values"]


@dataclass(frozen=True)
class SentValue:
    """A value that a stage sends to the next one.

    Args:
        crossing: the value, as its first reader reads it.
        stage: the stage that sends it.
        num_bytes: what a device sends of one microbatch.
        is_relayed: whether the stage neither made it nor reads it.
    """

    crossing: BoundaryValue
    stage: int
    num_bytes: float
    is_relayed: bool


def sent_values(
    crossings: Sequence[BoundaryValue], bounds: Sequence[int], strategies: Sequence[LayerStrategy]
) -> Iterator[SentValue]:
    """Everything that stages cut at `bounds` send to the next one, value by value in the order of production.

    `strategies` has one per layer.  A value goes from stage to stage as far as it is read, as its producer laid it out.
    """
    by_value: dict[str, list[BoundaryValue]] = {}
    for crossing in crossings:
        by_value.setdefault(crossing.value, []).append(crossing)

    def stage_of(layer: int) -> int:
        return bisect.bisect_right(bounds, layer) - 1

    for each in sorted(by_value.values(), key=lambda each: (each[0].producer, each[0].output)):
        first = each[0]
        producer = strategies[first.producer]
        shape = local_shape(first.tensor.shape, producer.outputs[first.output], producer.mesh)
        num_bytes = float(math.prod(shape) * itemsize_bytes(first.tensor.dtype))
        reading = {stage_of(crossing.reader) for crossing in each}
        made = stage_of(first.producer)
        for stage in range(made, max(reading)):
            yield SentValue(first, stage, num_bytes, stage != made and stage not in reading)


def layer_groups(shape: Shape, bounds: Sequence[int]) -> tuple[int, ...]:
    """Per layer, the device group that runs it; `bounds` are the stages' first layers, then the number of layers."""
    return tuple(shape.groups[bisect.bisect_right(bounds, layer) - 1] for layer in range(bounds[-1]))
