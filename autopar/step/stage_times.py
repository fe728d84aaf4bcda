"""What is predicted of pipeline stages: the one formula that the search minimises and the plan reports.

The seconds of a step are those of the schedule's timeline (`simulate_schedule` on the action list that will run) and,
after it, of what is done once per step on the device group that takes longest for it::

    step = timeline(actions, stages) + max over groups   sum over the group's stages   step_s

The bytes of a device group are what its layers hold all the time, what its microbatches in flight hold at most
(`peak_held`), and the largest transients of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from autopar.plan import Stage
from autopar.schedule import (
    ScheduleActions,
    Shape,
    StageTimes,
    count_flights,
    peak_held,
    simulate_schedule,
    stage_group,
)

__all__ = ["LayerParts", "pipeline_step_s", "predict_stages", "stage_times"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LayerParts:
    """Per layer, what it takes: seconds of one microbatch's forward and whole backward, the part of the latter for
    parameters' gradients, seconds once per step; bytes always, of one microbatch in flight, and while it runs.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    step_s: Array
    static_bytes: Array
    saved_bytes: Array
    transient_bytes: Array


def predict_stages(
    shape: Shape,
    bounds: Sequence[int],
    parts: LayerParts,
    sends: Sequence[tuple[float, float]],
    relayed_bytes: Sequence[float],
    broadcast_s: float,
    actions: ScheduleActions,
) -> tuple[Stage, ...]:
    """The stages with all their predictions.

    Args:
        shape: the schedule.
        bounds: first layer of every stage, then the number of layers.
        parts: what each layer takes.
        sends: for each cut, seconds to send what crosses it, and its gradients back.
        relayed_bytes: per stage, what it receives of one microbatch only to send it on.
        broadcast_s: seconds, once per step on every group, to tell all of them the loss.
        actions: the schedule's lists; without them peak bytes stay 0.
    """
    groups = [stage_group(shape.schedule, index, shape.num_groups) for index in range(shape.num_stages)]
    made: list[Stage] = []
    held: list[float] = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        part, group = slice(start, stop), groups[index]
        after = index + 1 < len(groups) and groups[index + 1] != group
        before = index > 0 and groups[index - 1] != group
        made.append(
            Stage(
                start=start,
                stop=stop,
                group=group,
                forward_s=float(parts.forward_s[part].sum()),
                backward_s=float(parts.backward_s[part].sum()),
                weight_s=float(parts.weight_s[part].sum()),
                step_s=float(parts.step_s[part].sum()) + (broadcast_s if groups.index(group) == index else 0.0),
                send_forward_s=sends[index][0] if after else 0.0,
                send_backward_s=sends[index - 1][1] if before else 0.0,
            )
        )
        held.append(float(parts.saved_bytes[part].sum()) + relayed_bytes[index])
    if not actions:
        return tuple(made)
    peaks = list(peak_held(actions, tuple(held), tuple(held)))
    for group in range(shape.num_groups):
        own = [slice(stage.start, stage.stop) for stage in made if stage.group == group]
        peaks[group] += sum(float(parts.static_bytes[part].sum()) for part in own)
        peaks[group] += max(float(parts.transient_bytes[part].max()) for part in own)
    flights = count_flights(actions, shape.num_stages)
    return tuple(
        replace(stage, peak_memory_bytes=peaks[stage.group], in_flight=flight)
        for stage, flight in zip(made, flights, strict=True)
    )


def stage_times(stages: Sequence[Stage]) -> tuple[StageTimes, ...]:
    """What `simulate_schedule` needs to know of the stages."""
    return tuple(
        StageTimes(stage.forward_s, stage.backward_s, stage.weight_s, stage.send_forward_s, stage.send_backward_s)
        for stage in stages
    )


def pipeline_step_s(actions: ScheduleActions, stages: Sequence[Stage]) -> float:
    """Seconds of a step that runs `actions` on `stages`."""
    once: dict[int, float] = {}
    for stage in stages:
        once[stage.group] = once.get(stage.group, 0.0) + stage.step_s
    return simulate_schedule(actions, stage_times(stages)).step_s + max(once.values())
