"""Closed forms for what the action lists say exactly: microbatches in flight, and about how long a step takes.

A large schedule has a hundred thousand actions; the search looks at many and simulates only the most promising ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedule import Shape, StageCost

__all__ = ["estimate_flights", "estimate_s", "fill_share", "is_small"]

_ACTIONS = 6  # about so many has a schedule's list for each stage and microbatch
_SMALL = 6000


def estimate_flights(shape: Shape) -> tuple[int, ...]:
    """What `count_flights` finds in the schedule's lists, or more."""
    groups, stages, count = shape.num_groups, shape.num_stages, shape.num_microbatches
    if shape.schedule == "gpipe":
        flights = [count] * stages
    elif shape.schedule in ("1f1b", "zbv"):
        flights = [stages - stage for stage in range(stages)]
    elif shape.schedule == "interleaved_1f1b":
        ranks = [_interleaved_flights(shape, rank) for rank in range(groups)]
        flights = [ranks[stage % groups][stage // groups] for stage in range(stages)]
    else:
        width = _round_width(shape)
        flights = [width if stage >= groups or stages == groups else 2 * width for stage in range(stages)]
    return tuple(min(count, flight) for flight in flights)


def _interleaved_flights(shape: Shape, rank: int) -> list[int]:
    """Per stage of one device group: forwards go through its stages a round of microbatches each, backwards too."""
    groups, count = shape.num_groups, shape.num_microbatches
    rounds = shape.num_stages // groups
    width = _round_width(shape)
    ahead = min(rounds * count, (rounds - 1) * width + 2 * (groups - 1 - rank))
    held, most = [0] * rounds, [0] * rounds
    for step in range(rounds * count):
        stage = step // width % rounds
        held[stage] += 1
        most[stage] = max(most[stage], held[stage])
        if step >= ahead:
            held[rounds - 1 - (step - ahead) // width % rounds] -= 1
    return most


def _round_width(shape: Shape) -> int:
    """How many microbatches go through a group's stage before it turns to its next stage."""
    return shape.num_microbatches // max(1, shape.num_microbatches // shape.num_groups)


def fill_share(shape: Shape) -> float:
    """What part of the sum of all stages' seconds goes by until the last device group has work, and when it ends."""
    rounds = shape.num_stages // shape.num_groups
    waiting = float(shape.num_groups - 1)
    if shape.schedule == "zbv":
        # Gradients of parameters fill two thirds of what was to be waited, if there are enough microbatches.
        waiting *= min(1.0, max(1 / 3, (5 - 2 * shape.num_microbatches / shape.num_groups) / 3))
    elif shape.schedule == "interleaved_zero_bubble":
        waiting *= 0.8
    return (rounds + waiting) / shape.num_stages


def estimate_s(shape: Shape, stages: Sequence[StageCost]) -> float:
    """About what `pipeline_step_s` says.

    From one microbatch to the next, every device group has its own work to do; and no stage has more microbatches in
    flight than the schedule lets it, each of which goes through all stages behind it and back.
    """
    works: dict[int, float] = {}
    once: dict[int, float] = {}
    period = behind = 0.0
    for group, stage, flight in zip(shape.groups[::-1], stages[::-1], estimate_flights(shape)[::-1], strict=True):
        seconds = stage.forward_s + stage.backward_s
        works[group] = works.get(group, 0.0) + seconds
        once[group] = once.get(group, 0.0) + stage.step_s
        behind += seconds + stage.send_forward_s
        period = max(period, behind / flight)
        behind += stage.send_backward_s
    period = max(period, *works.values())
    if shape.schedule == "gpipe":
        period = max(stage.forward_s for stage in stages) + max(stage.backward_s for stage in stages)
    return (shape.num_microbatches - 1) * period + fill_share(shape) * behind + max(once.values())


def is_small(shape: Shape) -> bool:
    """Whether simulating the schedule takes next to no time."""
    return _ACTIONS * shape.num_stages * shape.num_microbatches <= _SMALL
