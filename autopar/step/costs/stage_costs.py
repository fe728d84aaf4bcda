"""What pipeline stages cost: the one formula that a search minimizes and a prediction reports.

The seconds of a step are those of the schedule's timeline (`schedule_s` on the action list that will run) and,
after it, of what is done once per step on the device group that takes longest for it::

    step = timeline(actions, stages) + max over groups   sum over the group's stages   step_s

A search knows what of the latter groups do before their first action, while they may wait for others anyway: that is
where the timeline begins then.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.plan.prediction import LayerCost
from autopar.schedules import Shape
from autopar.schedules.action_lists import ScheduleActions, StageCost, schedule_s

__all__ = ["CostColumns", "pipeline_step_s", "stage_costs"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CostColumns:
    """Costs of several layers, or of several candidates for one, as arrays: an entry each.

    Seconds of one microbatch's forward and whole backward, the part of the latter for parameters' gradients (where a
    schedule can split it off), seconds once per step; bytes always, of one microbatch in flight, while it runs, and
    what is added to those of a microbatch between the two parts of its backward.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    step_s: Array
    static_bytes: Array
    saved_bytes: Array
    transient_bytes: Array
    split_bytes: Array

    @classmethod
    def of(cls, costs: Sequence[LayerCost], splits: Sequence[bool], num_microbatches: int) -> CostColumns:
        """Of these costs; `splits` says whose backward a schedule can split."""
        weight_s = [cost.weight_s * split for cost, split in zip(costs, splits, strict=True)]
        return cls(
            forward_s=np.array([cost.in_forward_s for cost in costs]) / num_microbatches,
            backward_s=np.array([cost.in_backward_s for cost in costs]) / num_microbatches,
            weight_s=np.array(weight_s) / num_microbatches,
            step_s=np.array([cost.in_step_s for cost in costs]),
            static_bytes=np.array([cost.static_bytes for cost in costs]),
            saved_bytes=np.array([cost.saved_bytes for cost in costs]),
            transient_bytes=np.array([cost.transient_bytes for cost in costs]),
            split_bytes=np.array([cost.split_bytes * split for cost, split in zip(costs, splits, strict=True)]),
        )


def stage_costs(
    shape: Shape, bounds: Sequence[int], layers: CostColumns, sends: Sequence[tuple[float, float]], broadcast_s: float
) -> tuple[StageCost, ...]:
    """The seconds of every stage.

    Args:
        shape: the schedule.
        bounds: first layer of every stage, then the number of layers.
        layers: the cost of each layer.
        sends: for each cut, seconds to send what crosses it, and its gradients back.
        broadcast_s: seconds, once per step on every group, to tell all of them the loss.
    """
    groups = shape.groups
    costs: list[StageCost] = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own, group = slice(start, stop), groups[index]
        after = index + 1 < len(groups) and groups[index + 1] != group
        before = index > 0 and groups[index - 1] != group
        costs.append(
            StageCost(
                forward_s=float(layers.forward_s[own].sum()),
                backward_s=float(layers.backward_s[own].sum()),
                weight_s=float(layers.weight_s[own].sum()),
                step_s=float(layers.step_s[own].sum()) + (broadcast_s if groups.index(group) == index else 0.0),
                send_forward_s=sends[index][0] if after else 0.0,
                send_backward_s=sends[index - 1][1] if before else 0.0,
            )
        )
    return tuple(costs)


def pipeline_step_s(
    shape: Shape, actions: ScheduleActions, stages: Sequence[StageCost], begins_s: Sequence[float] = ()
) -> float:
    """Seconds of a step that runs `actions`, the schedule's own lists, on `stages`; `begins_s` has for each group what
    it does of `step_s` before its first action.
    """
    once_s = [-begin_s for begin_s in begins_s] or [0.0] * shape.num_groups
    for group, stage in zip(shape.groups, stages, strict=True):
        once_s[group] += stage.step_s
    return schedule_s(actions, tuple(stages), begins_s) + max(once_s)
