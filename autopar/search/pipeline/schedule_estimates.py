"""What is known of a schedule with equal stages, from which other pipelines are estimated: idle time, memory."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autopar.schedules import Shape
from autopar.schedules.action_lists import ScheduleActions, StageCost, peak_in_flight, schedule_s

__all__ = ["Idle", "held_shares", "idle_of", "is_small"]

_ACTIONS = 6  # about so many has a schedule's list for each stage and microbatch
_SMALL = 6000  # actions: predicting a step of so few is cheap
_STAGE_S = 3.0  # a forward of 1, a backward of 2, of which 1 is for parameters


class Idle(NamedTuple):
    """How long device groups wait.

    Args:
        fill_share: what part of the sum of all stages' seconds for one microbatch goes by until the last group has
            work, and when it ends, if no backward is split.
        split_gain: what part of the backwards for parameters a group does while it would wait, if they are split off.
    """

    fill_share: float
    split_gain: float


@lru_cache(maxsize=256)
def idle_of(shape: Shape, actions: ScheduleActions) -> Idle:
    """Of pipelines of this shape whose stages are equal; `actions` is its list."""
    whole_s, split_s = (
        schedule_s(actions, (StageCost(1.0, _STAGE_S - 1.0, weight_s, 0.0, 0.0),) * shape.num_stages)
        for weight_s in (0.0, 1.0)
    )
    rounds, count = shape.num_stages // shape.num_groups, shape.num_microbatches
    fill_s = whole_s - (count - 1) * rounds * _STAGE_S
    return Idle(fill_s / (_STAGE_S * shape.num_stages), min(1.0, max(0.0, whole_s - split_s) / (count * rounds)))


@lru_cache(maxsize=256)
def held_shares(shape: Shape, actions: ScheduleActions) -> tuple[float, ...]:
    """For each device group, the most microbatches that its stages have in flight together, relative to the most of
    each of them: 143 of 192 where 16 groups have 8 stages each and interleave 64 microbatches.
    """
    ones, most = (1.0,) * shape.num_stages, [0] * shape.num_groups
    for group, flight in zip(shape.groups, shape.flights, strict=True):
        most[group] += flight.in_flight
    together = peak_in_flight(actions, ones, ones)
    return tuple(min(1.0, held / max(1, own)) for held, own in zip(together, most, strict=True))


def is_small(shape: Shape) -> bool:
    """Whether predicting a step of the schedule is cheap."""
    return _ACTIONS * shape.num_stages * shape.num_microbatches <= _SMALL
