"""Find a schedule by its name; `Shape` is a schedule with its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from autopar.schedules.action_lists import ScheduleActions, ScheduleSource
from autopar.schedules.record import PipelineSchedule
from autopar.schedules.torch_schedules import RECORDS

__all__ = [
    "Flight",
    "Shape",
    "find_schedule",
    "register_schedule",
    "schedule_names",
    "schedule_problem",
    "simplest_schedule",
    "stage_group",
]


_records = {record.name: record for record in RECORDS}


def register_schedule(schedule: PipelineSchedule) -> None:
    """Add a schedule, or replace the one of this name.

    Every process that plans or runs with it registers it.

    Raises:
        ValueError: it has neither or both of a class of torch and an order.
    """
    if bool(schedule.torch_class) == bool(schedule.order):
        raise ValueError(f"schedule {schedule.name!r} needs torch_class= or order=, and only one of them")
    _records[schedule.name] = schedule


def schedule_names() -> tuple[str, ...]:
    """The names of all schedules."""
    return tuple(_records)


def find_schedule(name: str) -> PipelineSchedule:
    """The schedule of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in _records:
        raise ValueError(_unknown(name))
    return _records[name]


def stage_group(schedule: str, stage: int, num_groups: int) -> int:
    """The device group that runs `stage`: round and round, or there and back again."""
    turn, place = divmod(stage, num_groups)
    return num_groups - 1 - place if find_schedule(schedule).is_v_shaped and turn % 2 else place


def schedule_problem(schedule: str, num_groups: int, num_stages: int, num_microbatches: int) -> str:
    """Why `schedule` can't run so many stages and microbatches on so many groups; "" if it can."""
    if schedule not in _records:
        return _unknown(schedule)
    if num_groups < 2 or num_stages % num_groups:
        return f"{num_stages} stages can't be dealt out to {num_groups} device groups"
    record, rounds = _records[schedule], num_stages // num_groups
    if rounds < record.min_stages or (record.max_stages and rounds > record.max_stages):
        return f"{schedule} needs {record.stages_text} stages per device group, not {rounds}"
    problem = record.problem(num_groups, num_stages, num_microbatches)
    return f"{schedule} {problem}" if problem else ""


def simplest_schedule(schedule: str, num_groups: int, num_stages: int) -> str:
    """One that runs the stages of `schedule` on the same device groups, also in a single microbatch; it splits no
    backward if there is such a one.
    """
    is_v_shaped = find_schedule(schedule).is_v_shaped
    same = [each for each in _records.values() if each.is_v_shaped == is_v_shaped]
    possible = [each for each in same if not schedule_problem(each.name, num_groups, num_stages, 1)]
    return min(possible, key=lambda each: each.splits_backward).name if possible else schedule


def _unknown(name: str) -> str:
    return f"there is no schedule {name!r:.40}; there are {', '.join(_records)}"


class Flight(NamedTuple):
    """How many microbatches are between forward and the end of backward, and how many of them between the two parts of
    a backward in two parts.
    """

    in_flight: int = 1
    split: int = 0


@dataclass(frozen=True)
class Shape:
    """A schedule, by name, with its numbers of device groups, stages and microbatches."""

    schedule: str
    num_groups: int
    num_stages: int
    num_microbatches: int

    @property
    def record(self) -> PipelineSchedule:
        """The schedule."""
        return find_schedule(self.schedule)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The device group of each stage."""
        return tuple(stage_group(self.schedule, stage, self.num_groups) for stage in range(self.num_stages))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """What `count_flights` finds in the schedule's lists, or more."""
        counts = self.record.in_flight(self.num_groups, self.num_stages, self.num_microbatches)
        return tuple(min(self.num_microbatches, count) for count in counts)

    @cached_property
    def flights(self) -> tuple[Flight, ...]:
        """Of each stage, `in_flight` with how many of these wait between the two parts of their backward, or more."""
        if not self.record.splits_backward:
            return tuple(map(Flight, self.in_flight))
        # The schedules that split it delay W on group g by g backwards (as counted in their lists).
        waits = (group + 1 for group in self.groups)
        return tuple(Flight(count, min(count, wait)) for count, wait in zip(self.in_flight, waits, strict=True))

    def actions(self, source: ScheduleSource) -> ScheduleActions:
        """The schedule's lists."""
        return source(self.schedule, self.num_groups, self.num_stages, self.num_microbatches)
