"""The schedules of torch.distributed.pipelining, a record each."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.record import PipelineSchedule

__all__ = ["RECORDS"]


def _as_many_as_stages(num_groups: int, num_stages: int, num_microbatches: int) -> str:
    enough = num_microbatches >= num_stages
    return "" if enough else f"needs at least as many microbatches as stages, not {num_microbatches} for {num_stages}"


def _even_rounds(num_groups: int, num_stages: int, num_microbatches: int) -> str:
    uneven = num_microbatches % max(1, num_microbatches // num_groups)
    return f"on {num_groups} device groups can't deal out {num_microbatches} microbatches evenly" if uneven else ""


def _stages_behind(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    """A stage runs a backward as soon as the stages behind it have."""
    return range(num_stages, 0, -1)


def _round_width(num_groups: int, num_microbatches: int) -> int:
    """How many microbatches go through a group's stage before it turns to its next stage."""
    return num_microbatches // max(1, num_microbatches // num_groups)


def _interleaved_flights(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    ranks = [_flights_of(rank, num_groups, num_stages // num_groups, num_microbatches) for rank in range(num_groups)]
    return [ranks[stage % num_groups][stage // num_groups] for stage in range(num_stages)]


def _flights_of(rank: int, groups: int, rounds: int, count: int) -> list[int]:
    """Per stage of one device group: forwards go through its stages a round of microbatches each, backwards too."""
    width = _round_width(groups, count)
    ahead = min(rounds * count, (rounds - 1) * width + 2 * (groups - 1 - rank))
    held, most = [0] * rounds, [0] * rounds
    for step in range(rounds * count):
        stage = step // width % rounds
        held[stage] += 1
        most[stage] = max(most[stage], held[stage])
        if step >= ahead:
            held[rounds - 1 - (step - ahead) // width % rounds] -= 1
    return most


def _zero_bubble_flights(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    width = _round_width(num_groups, num_microbatches)
    is_single = num_stages == num_groups
    return [width if stage >= num_groups or is_single else 2 * width for stage in range(num_stages)]


# What is equally fast is chosen in this order.
RECORDS = (
    PipelineSchedule("gpipe", "ScheduleGPipe", max_stages=1, forwards_first=True),
    PipelineSchedule("1f1b", "Schedule1F1B", max_stages=1, problem=_as_many_as_stages, in_flight=_stages_behind),
    PipelineSchedule(
        "interleaved_1f1b", "ScheduleInterleaved1F1B",
        min_stages=2, problem=_even_rounds, in_flight=_interleaved_flights,
    ),
    PipelineSchedule(
        "interleaved_zero_bubble", "ScheduleInterleavedZeroBubble",
        splits_backward=True, problem=_even_rounds, in_flight=_zero_bubble_flights,
    ),
    PipelineSchedule(
        "zbv", "ScheduleZBVZeroBubble",
        min_stages=2, max_stages=2, is_v_shaped=True, splits_backward=True,
        in_flight=_stages_behind,
    ),
    # Breadth first: as long as interleaved_1f1b, with more in flight.
    PipelineSchedule(
        "looped_bfs", "ScheduleLoopedBFS", min_stages=2, forwards_first=True, is_searched=False,
    ),
    # A forward and a backward that torch would overlap run one after the other, so zbv is as fast.
    PipelineSchedule(
        "dualpipev", "ScheduleDualPipeV",
        min_stages=2, max_stages=2, is_v_shaped=True, splits_backward=True, is_searched=False,
        problem=_as_many_as_stages, in_flight=_stages_behind,
    ),
)  # fmt: skip
