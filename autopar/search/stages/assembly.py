"""From a pipeline that the search has found to a `Plan`, priced again from the plan's own decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.placement import Axis
from autopar.plan import LayerCost, Plan, Stage
from autopar.schedule import ScheduleActions, ScheduleSource, Shape
from autopar.search.assembly import Choice, assemble_plan, layer_costs
from autopar.search.stages.solve import Staged
from autopar.step.plan_collectives import broadcast_s
from autopar.step.sent_values import layer_groups, sent_values
from autopar.step.stage_times import LayerParts, pipeline_step_s, predict_stages

__all__ = [
    "assemble_pipeline",
    "assemble_staged",
]


def assemble_staged(staged: Staged, source: ScheduleSource) -> Plan:
    """The plan of this pipeline; limits, gap, constraints and notes are the caller's to fill in."""
    groups = layer_groups(staged.shape, staged.bounds)
    return assemble_pipeline(staged.setting.choice(staged.path, groups), staged.shape, staged.bounds, source)


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
