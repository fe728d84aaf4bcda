"""The records of the schedules of torch.distributed.pipelining, and of one that it lacks."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.record import PipelineSchedule

__all__ = ["RECORDS"]


def _fewer_than_stages(num_groups: int, num_stages: int, num_microbatches: int) -> str:
    enough = num_microbatches >= num_stages
    return "" if enough else f"needs at least as many microbatches as stages, not {num_microbatches} for {num_stages}"


def _uneven_rounds(num_groups: int, num_stages: int, num_microbatches: int) -> str:
    rest = num_microbatches % max(1, num_microbatches // num_groups)
    return f"on {num_groups} device groups can't run {num_microbatches} microbatches in even rounds" if rest else ""


def _stages_to_end(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    """A stage has one microbatch in flight for itself and one for each later stage."""
    return range(num_stages, 0, -1)


def _round_width(num_groups: int, num_microbatches: int) -> int:
    """The number of microbatches that one stage of a group runs in a row before the group's next stage."""
    return num_microbatches // max(1, num_microbatches // num_groups)


def _interleaved_flights(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    rounds = num_stages // num_groups
    groups = [_group_flights(group, num_groups, rounds, num_microbatches) for group in range(num_groups)]
    return [groups[stage % num_groups][stage // num_groups] for stage in range(num_stages)]


def _group_flights(group: int, num_groups: int, num_stages: int, num_microbatches: int) -> list[int]:
    """The microbatches in flight in each of the `num_stages` stages of one device group.

    Forwards go through its stages in turn, `_round_width` microbatches in each, and so do backwards.
    """
    width, num_forwards = _round_width(num_groups, num_microbatches), num_stages * num_microbatches
    ahead = min(num_forwards, (num_stages - 1) * width + 2 * (num_groups - 1 - group))
    in_flight, peaks = [0] * num_stages, [0] * num_stages
    for step in range(num_forwards):
        stage = step // width % num_stages
        in_flight[stage] += 1
        peaks[stage] = max(peaks[stage], in_flight[stage])
        if step >= ahead:
            in_flight[num_stages - 1 - (step - ahead) // width % num_stages] -= 1
    return peaks


def _zero_bubble_flights(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[int]:
    width = _round_width(num_groups, num_microbatches)
    is_single = num_stages == num_groups
    return [width if stage >= num_groups or is_single else 2 * width for stage in range(num_stages)]


def _breadth_first_v(num_groups: int, num_stages: int, num_microbatches: int) -> Sequence[str]:
    """All forwards of a group's first stage, then of its second, and backwards the other way round."""

    def all_of(kind: str, stage: int) -> str:
        return " ".join(f"{stage}{kind}{microbatch}" for microbatch in range(num_microbatches))

    pairs = [(group, num_stages - 1 - group) for group in range(num_groups)]
    return [" ".join((all_of("F", a), all_of("F", b), all_of("B", b), all_of("B", a))) for a, b in pairs]


# Among equally fast schedules the search prefers earlier ones.
RECORDS = (
    PipelineSchedule("gpipe", "ScheduleGPipe", max_stages=1, forwards_first=True),
    PipelineSchedule("1f1b", "Schedule1F1B", max_stages=1, problem=_fewer_than_stages, in_flight=_stages_to_end),
    PipelineSchedule(
        "interleaved_1f1b", "ScheduleInterleaved1F1B",
        min_stages=2, problem=_uneven_rounds, in_flight=_interleaved_flights,
    ),
    PipelineSchedule(
        "interleaved_zero_bubble", "ScheduleInterleavedZeroBubble",
        splits_backward=True, problem=_uneven_rounds, in_flight=_zero_bubble_flights,
    ),
    PipelineSchedule(
        "zbv", "ScheduleZBVZeroBubble",
        min_stages=2, max_stages=2, is_v_shaped=True, splits_backward=True,
        in_flight=_stages_to_end,
    ),
    # Breadth first: as fast as interleaved_1f1b, with more microbatches in flight.
    PipelineSchedule(
        "looped_bfs", "ScheduleLoopedBFS", min_stages=2, forwards_first=True, is_searched=False,
    ),
    # What zbv and dualpipev become where the loss comes behind all forwards.
    PipelineSchedule(
        "breadth_first_v", order=_breadth_first_v,
        min_stages=2, max_stages=2, is_v_shaped=True, forwards_first=True, is_searched=False,
    ),
    # A forward and a backward that torch would overlap run sequentially here, so that zbv is as fast if
    # stages are equal.
    PipelineSchedule(
        "dualpipev", "ScheduleDualPipeV",
        min_stages=2, max_stages=2, is_v_shaped=True, splits_backward=True, is_searched=False,
        variant_of="zbv", problem=_fewer_than_stages, in_flight=_stages_to_end,
    ),
)  # fmt: skip
