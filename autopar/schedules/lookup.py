"""Looks up schedules by name; `Shape` is a schedule with its numbers of groups, stages and microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.schedules.action_lists import ScheduleActions, ScheduleSource
from autopar.schedules.record import PipelineSchedule
from autopar.schedules.torch_schedules import RECORDS

__all__ = [
    "Flight",
    "RowsSchedule",
    "Shape",
    "find_schedule",
    "register_schedule",
    "rows_schedule",
    "schedule_names",
    "schedule_problem",
    "simplest_schedule",
    "stage_group",
]


_records = {record.name: record for record in RECORDS}


def register_schedule(schedule: PipelineSchedule) -> None:
    """Add a schedule, or replace the one of this name.

    Every process that plans or runs with it must register it.

    Raises:
        ValueError: it has neither a torch class nor an order, or both.
    """
    if bool(schedule.torch_class) == bool(schedule.order):
        raise ValueError(f"schedule {schedule.name!r} needs either torch_class= or order=, not both")
    _records[schedule.name] = schedule


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules."""
    return tuple(_records)


def find_schedule(name: str) -> PipelineSchedule:
    """Return the schedule of this name.

    Raises:
        ValueError: there is no schedule of this name.
    """
    if name not in _records:
        raise ValueError(_unknown(name))
    return _records[name]


def stage_group(schedule: str, stage: int, num_groups: int) -> int:
    """The device group that runs `stage`; in V-shaped schedules every other round goes through the groups backwards."""
    turn, position = divmod(stage, num_groups)
    return num_groups - 1 - position if find_schedule(schedule).is_v_shaped and turn % 2 else position


def schedule_problem(schedule: str, num_groups: int, num_stages: int, num_microbatches: int) -> str:
    """Return why `schedule` can't run with these numbers of groups, stages and microbatches; "" if it can."""
    if schedule not in _records:
        return _unknown(schedule)
    if num_groups < 2 or num_stages % num_groups:
        return f"{num_stages} stages can't be divided among {num_groups} device groups"
    record, rounds = _records[schedule], num_stages // num_groups
    if rounds < record.min_stages or (record.max_stages and rounds > record.max_stages):
        return f"{schedule} needs {record.stages_text} stages per device group, not {rounds}"
    problem = record.problem(num_groups, num_stages, num_microbatches)
    return f"{schedule} {problem}" if problem else ""


def simplest_schedule(schedule: str, num_groups: int, num_stages: int, *, has_loss: bool = True) -> str:
    """The simplest schedule that runs the stages of `schedule` on the same device groups in a single microbatch.

    It doesn't split backwards unless its stages form a V, and without a loss in the program begins them behind all
    forwards.  If no schedule fits, it is `schedule` itself.
    """
    is_v_shaped = find_schedule(schedule).is_v_shaped
    records = [record for record in _records.values() if record.is_v_shaped == is_v_shaped]
    legal = [record for record in records if not schedule_problem(record.name, num_groups, num_stages, 1)]
    if not has_loss:
        legal = [record for record in legal if record.forwards_first]
    # With a loss the V that splits backwards stays: the other one keeps all microbatches in memory.
    return min(legal, key=lambda record: record.splits_backward and not is_v_shaped).name if legal else schedule


class RowsSchedule(NamedTuple):
    """How a group of devices that differs from others runs its rows, one in each microbatch.

    Args:
        name: of the schedule.
        microbatches: as many as rows, or more, the last of which don't count.
    """

    name: str
    microbatches: int


def rows_schedule(num_groups: int, num_stages: int, rows: int) -> RowsSchedule:
    """The schedule of so many rows through stages on `num_groups` device groups, with which the number of rows in
    flight has a bound.

    That is 1F1B with a stage for each device group.  With several, rows go through them in rounds of `num_groups`
    (interleaved 1F1B), and the last round is filled up with rows that don't count.
    """
    if num_stages > num_groups:
        return RowsSchedule("interleaved_1f1b", -(-rows // num_groups) * num_groups)
    return RowsSchedule("gpipe" if schedule_problem("1f1b", num_groups, num_groups, rows) else "1f1b", rows)


def _unknown(name: str) -> str:
    return f"there is no schedule {name!r:.40}; known schedules are {', '.join(_records)}"


class Flight(NamedTuple):
    """The microbatches in flight in a stage.

    `in_flight` counts those between their forward and the end of their backward, `split` those of them that wait
    between the two parts of a split backward.
    """

    in_flight: int = 1
    split: int = 0


@dataclass(frozen=True)
class Shape:
    """A schedule's name with its numbers of device groups, stages and microbatches."""

    schedule: str
    num_groups: int
    num_stages: int
    num_microbatches: int

    @property
    def record(self) -> PipelineSchedule:
        """The record of the schedule."""
        return find_schedule(self.schedule)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The device group of each stage."""
        return tuple(stage_group(self.schedule, stage, self.num_groups) for stage in range(self.num_stages))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage, an upper bound of the microbatches in flight (`count_flights` of the schedule's lists)."""
        counts = self.record.in_flight(self.num_groups, self.num_stages, self.num_microbatches)
        return tuple(min(self.num_microbatches, count) for count in counts)

    @cached_property
    def flights(self) -> tuple[Flight, ...]:
        """For each stage, `in_flight` and an upper bound of those that wait between the two parts of their backward."""
        if not self.record.splits_backward:
            return tuple(map(Flight, self.in_flight))
        # Schedules that split backwards delay W on group g by g backwards (counted in torch's lists).
        delays = (group + 1 for group in self.groups)
        return tuple(Flight(count, min(count, delay)) for count, delay in zip(self.in_flight, delays, strict=True))

    def actions(self, source: ScheduleSource) -> ScheduleActions:
        """The action lists of the schedule from `source`."""
        return source(self.schedule, self.num_groups, self.num_stages, self.num_microbatches)
