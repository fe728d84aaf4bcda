"""Pipeline schedules: one record each (`autopar.schedules.torch_schedules`), looked up by name."""

from autopar.schedules.lookup import (
    Flight,
    RowsSchedule,
    Shape,
    find_schedule,
    register_schedule,
    rows_schedule,
    schedule_names,
    schedule_problem,
    simplest_schedule,
    stage_group,
)
from autopar.schedules.record import PipelineSchedule

__all__ = [
    "Flight",
    "PipelineSchedule",
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
