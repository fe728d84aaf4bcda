"""Closed forms for what the action lists of schedules say exactly."""

from __future__ import annotations

from autopar.schedules import Shape

__all__ = ["fill_share", "is_small"]

_ACTIONS = 6  # about so many has a schedule's list for each stage and microbatch
_SMALL = 6000  # actions: to predict a step of so few takes next to no time


def fill_share(shape: Shape) -> float:
    """What part of the sum of all stages' seconds goes by until the last device group has work, and when it ends."""
    groups, stages, count = shape.num_groups, shape.num_stages, shape.num_microbatches
    return (stages // groups + (groups - 1) * shape.record.bubble(groups, stages, count)) / stages


def is_small(shape: Shape) -> bool:
    """Whether predicting a step of the schedule takes next to no time."""
    return _ACTIONS * shape.num_stages * shape.num_microbatches <= _SMALL
