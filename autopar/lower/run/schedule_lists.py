"""The action lists of pipeline schedules, as torch.distributed.pipelining makes them.

torch's schedule classes want stage objects; here these are `PlannedStage`, which only say which stage they are.  So no
model, shape inference, process group or P2P operation of torch.distributed.pipelining takes part.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from autopar.schedule import Action, ScheduleActions, schedule_problem, stage_group

__all__ = ["PlannedStage", "schedule_actions"]

_torch: Any = torch_schedules  # private classes and incomplete annotations

_COMPUTE = ("F", "B", "I", "W")
_KINDS = (*_COMPUTE, "SEND_F", "RECV_F", "SEND_B", "RECV_B")  # torch also lists what only FSDP needs
_MULTIPLE = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
_SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


@lru_cache(maxsize=64)
def schedule_actions(schedule: str, num_groups: int, num_stages: int, num_microbatches: int) -> ScheduleActions:
    """Per device group, everything that it does in one step, in order; a `ScheduleSource`.

    Raises:
        ValueError: `schedule_problem` says why there is no such schedule.

    Example:
        >>> [str(action) for action in schedule_actions("gpipe", 2, 2, 1)[1]]
        ['1RECV_F0', '1F0', '1B0', '1SEND_B0']
    """
    problem = schedule_problem(schedule, num_groups, num_stages, num_microbatches)
    if problem:
        raise ValueError(problem)
    rounds = num_stages // num_groups
    stages = [PlannedStage(index * num_groups, num_stages, num_groups) for index in range(rounds)]
    if schedule in _SINGLE:
        order = getattr(_torch, _SINGLE[schedule])(stages[0], num_microbatches)._get_pipeline_order()
        runtime = _torch._PipelineScheduleRuntime(stages, num_microbatches)
        runtime._prepare_schedule_with_comms({group: _Upcoming(_in_order(order[group])) for group in order})
    else:
        with _without_warnings():
            runtime = _quick(getattr(_torch, _MULTIPLE[schedule]))(stages, num_microbatches)
    lowered = runtime.pipeline_order_with_comms
    found = tuple(
        tuple(
            Action(action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in _select(lowered[group], _KINDS)
        )
        for group in range(num_groups)
    )
    _check_groups(schedule, found)
    return found


class _Upcoming(list[Any]):
    """A group's actions; the rest from some action on is told by the first action of each stage in it.

    For every action torch looks through all that follow for the next few stages, to prefetch their parameters: in a
    list of a thousand actions, where a group has two stages, that takes most of the time.
    """

    def __init__(self, actions: Iterable[Any]) -> None:
        super().__init__(actions)
        self._firsts: list[tuple[Any, ...]] = [()]
        for action in reversed(self):
            after = self._firsts[-1]
            if action is not None:
                after = (action, *(each for each in after if each.stage_index != action.stage_index))
            self._firsts.append(after)
        self._firsts.reverse()

    def __getitem__(self, index: Any) -> Any:
        start: Any = getattr(index, "start", None)
        if start is not None and getattr(index, "stop", None) is None:
            return self._firsts[int(start)]
        return super().__getitem__(index)


@cache
def _quick(schedule: Any) -> Any:
    """One of torch's schedule classes, that makes the same lists in less time."""

    class Quick(schedule):
        def _prepare_schedule_with_comms(self, actions: Mapping[int, Iterable[Any]], *rest: Any) -> None:
            upcoming = {group: _Upcoming(actions[group]) for group in actions}
            schedule._prepare_schedule_with_comms(self, upcoming, *rest)

    return Quick


def _select(actions: Iterable[Any], kinds: tuple[str, ...]) -> Iterable[Any]:
    """Those of torch's actions, some of which are None, that are of these kinds."""
    return (action for action in actions if action is not None and action.computation_type.value in kinds)


def _in_order(actions: Iterable[Any]) -> list[Any]:
    """The computing actions of one stage, its microbatches counted from 0 in each direction.

    torch 2.13's 1F1B lists those of the last stage's forwards from 1 on (its own step loop counts right).
    """
    counts: Counter[str] = Counter()
    found: list[Any] = []
    for action in _select(actions, _COMPUTE):
        found.append(action._replace(microbatch_index=counts[action.computation_type.value]))
        counts[action.computation_type.value] += 1
    return found


def _check_groups(schedule: str, actions: ScheduleActions) -> None:
    for group, listed in enumerate(actions):
        for action in listed:
            expected = stage_group(schedule, action.stage, len(actions))
            if group != expected:
                raise RuntimeError(
                    f"this torch runs {action} of schedule {schedule} on device group {group}, not {expected}"
                )


@contextmanager
def _without_warnings() -> Generator[None]:
    """torch warns of the bubbles of a zero-bubble schedule with few microbatches; here they are priced."""
    logger = logging.getLogger(torch_schedules.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass
class PlannedStage:
    """What torch's schedules want to know of a stage to list their actions."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: None = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def is_first(self) -> bool:
        """Whether no stage comes before."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether no stage follows."""
        return self.stage_index == self.num_stages - 1
