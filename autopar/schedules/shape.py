"""How a pipeline runs, apart from where it is cut."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.schedules.action_lists import ScheduleActions, ScheduleSource
from autopar.schedules.lookup import find_schedule, stage_group
from autopar.schedules.record import PipelineSchedule

__all__ = ["Shape"]


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

    @property
    def groups(self) -> tuple[int, ...]:
        """The device group of each stage."""
        return tuple(stage_group(self.schedule, stage, self.num_groups) for stage in range(self.num_stages))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """What `count_flights` finds in the schedule's lists, or more."""
        counts = self.record.in_flight(self.num_groups, self.num_stages, self.num_microbatches)
        return tuple(min(self.num_microbatches, count) for count in counts)

    def actions(self, source: ScheduleSource) -> ScheduleActions:
        """The schedule's lists."""
        return source(self.schedule, self.num_groups, self.num_stages, self.num_microbatches)
