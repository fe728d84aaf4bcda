"""Closed forms for what the action lists say exactly: microbatches in flight, and about how long a step takes.

A large schedule has a hundred thousand actions; the search looks at many and simulates only the most promising ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules import Shape
from autopar.schedules.action_lists import StageCost

__all__ = ["estimate_s", "fill_share", "is_small"]

_ACTIONS = 6  # about so many has a schedule's list for each stage and microbatch
_SMALL = 6000  # actions: to simulate so few costs little next to finding the pipeline


def fill_share(shape: Shape) -> float:
    """What part of the sum of all stages' seconds goes by until the last device group has work, and when it ends."""
    groups, stages, count = shape.num_groups, shape.num_stages, shape.num_microbatches
    return (stages // groups + (groups - 1) * shape.record.bubble(groups, stages, count)) / stages


def estimate_s(shape: Shape, stages: Sequence[StageCost]) -> float:
    """About what `pipeline_step_s` says.

    From one microbatch to the next, every device group has its own work to do; and no stage has more microbatches in
    flight than the schedule lets it, each of which goes through all stages behind it and back.
    """
    works: dict[int, float] = {}
    once: dict[int, float] = {}
    period = behind = 0.0
    for group, stage, flight in zip(shape.groups[::-1], stages[::-1], shape.in_flight[::-1], strict=True):
        seconds = stage.forward_s + stage.backward_s
        works[group] = works.get(group, 0.0) + seconds
        once[group] = once.get(group, 0.0) + stage.step_s
        behind += seconds + stage.send_forward_s
        period = max(period, behind / flight)
        behind += stage.send_backward_s
    period = max(period, *works.values())
    if shape.record.forwards_first:
        period = _longest_s(shape, [stage.forward_s for stage in stages])
        period += _longest_s(shape, [stage.backward_s for stage in stages])
    return (shape.num_microbatches - 1) * period + fill_share(shape) * behind + max(once.values())


def _longest_s(shape: Shape, stages_s: Sequence[float]) -> float:
    """Of the device groups, each with the sum of its stages."""
    works: dict[int, float] = {}
    for group, seconds in zip(shape.groups, stages_s, strict=True):
        works[group] = works.get(group, 0.0) + seconds
    return max(works.values())


def is_small(shape: Shape) -> bool:
    """Whether simulating the schedule takes next to no time."""
    return _ACTIONS * shape.num_stages * shape.num_microbatches <= _SMALL
