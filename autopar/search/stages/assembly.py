"""From a pipeline that the search has found to a `Plan`, priced again from the plan's own decisions."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.placement import Axis, local_shape
from autopar.plan import LayerCost, LayerStrategy, Plan, Stage
from autopar.program import itemsize_bytes
from autopar.schedule import ScheduleActions, ScheduleSource, stage_group
from autopar.search.assembly import Choice, assemble_plan, layer_costs
from autopar.search.crossings import Crossing
from autopar.search.stages.constraints import Shape
from autopar.search.stages.prediction import LayerParts, pipeline_step_s, predict_stages
from autopar.search.stages.setting import broadcast_s
from autopar.search.stages.solve import Staged

__all__ = ["SentValue", "assemble_pipeline", "assemble_staged", "layer_groups", "sent_values"]


@dataclass(frozen=True)
class SentValue:
    """A value that a stage sends to the next one.

    Args:
        crossing: the value, as its first reader reads it.
        stage: the stage that sends it.
        num_bytes: what a device sends of one microbatch.
        is_relayed: whether the stage neither made it nor reads it.
    """

    crossing: Crossing
    stage: int
    num_bytes: float
    is_relayed: bool


def sent_values(
    crossings: Sequence[Crossing], bounds: Sequence[int], strategies: Sequence[LayerStrategy]
) -> Iterator[SentValue]:
    """Everything that stages cut at `bounds` send to the next one, value by value in the order of production.

    `strategies` has one per layer.  A value goes from stage to stage as far as it is read, as its producer laid it out.
    """
    by_value: dict[str, list[Crossing]] = {}
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


def assemble_staged(staged: Staged, source: ScheduleSource) -> Plan:
    """The plan of this pipeline; limits, gap, constraints and notes are the caller's to fill in."""
    groups = layer_groups(staged.shape, staged.bounds)
    return assemble_pipeline(staged.setting.choice(staged.path, groups), staged.shape, staged.bounds, source)


def layer_groups(shape: Shape, bounds: Sequence[int]) -> tuple[int, ...]:
    """Per layer, the device group that runs it; `bounds` are the stages' first layers, then the number of layers."""
    groups = [stage_group(shape.schedule, index, shape.num_groups) for index in range(shape.num_stages)]
    return tuple(groups[bisect.bisect_right(bounds, layer) - 1] for layer in range(bounds[-1]))


def assemble_pipeline(choice: Choice, shape: Shape, bounds: Sequence[int], source: ScheduleSource) -> Plan:
    """As `assemble_plan`, of a choice that runs in stages."""
    scene = choice.scene
    actions = source(shape.schedule, shape.num_groups, shape.num_stages, shape.num_microbatches)
    stages = _predict(choice, shape, bounds, actions)
    return replace(
        assemble_plan(choice, scene.program, scene.prices, scene.training),
        step_time_s=pipeline_step_s(actions, stages),
        peak_memory_bytes=max(stage.peak_memory_bytes for stage in stages),
        stages=stages,
        schedule=shape.schedule,
    )


def _predict(choice: Choice, shape: Shape, bounds: Sequence[int], actions: ScheduleActions) -> tuple[Stage, ...]:
    scene = choice.scene
    axis = Axis(shape.num_groups, choice.world_size // shape.num_groups)
    sends = np.zeros((shape.num_stages, 2))
    relayed = np.zeros(shape.num_stages)
    strategies = [candidate.strategy for candidate in choice.candidates]
    for sent in sent_values(choice.crossings, bounds, strategies):
        has_gradient = sent.crossing.requires_grad and scene.training.is_training
        seconds = scene.prices.collective_s("send", axis, sent.num_bytes)
        sends[sent.stage] += seconds, seconds if has_gradient else 0.0
        relayed[sent.stage] += sent.num_bytes if sent.is_relayed else 0.0
    return predict_stages(
        shape,
        bounds,
        _parts(layer_costs(choice), [strategy.splits_backward for strategy in strategies], shape),
        [(float(ahead), float(back)) for ahead, back in sends],
        relayed.tolist(),
        broadcast_s(scene.program, scene.prices, axis),
        actions,
    )


def _parts(costs: Sequence[LayerCost], splits: Sequence[bool], shape: Shape) -> LayerParts:
    count = shape.num_microbatches
    return LayerParts(
        np.array([cost.in_forward_s for cost in costs]) / count,
        np.array([cost.in_backward_s for cost in costs]) / count,
        np.array([cost.weight_s * can for cost, can in zip(costs, splits, strict=True)]) / count,
        np.array([cost.in_step_s for cost in costs]),
        np.array([cost.static_bytes for cost in costs]),
        np.array([cost.saved_bytes for cost in costs]),
        np.array([cost.transient_bytes for cost in costs]),
    )
