"""The action lists of pipeline schedules, from torch's schedule classes or from what a schedule's record writes.

torch.distributed.pipelining adds the sends and receives.  It wants stage objects; here these are `_PlannedStage`, which
only say which stage they are.  So no model, shape inference, process group or P2P operation of it takes part.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from autopar.schedules import PipelineSchedule, find_schedule, schedule_problem, stage_group
from autopar.schedules.action_lists import Action, ScheduleActions, parse_action

__all__ = ["schedule_actions"]

_torch: Any = torch_schedules  # private classes and incomplete annotations

_COMPUTE = ("F", "B", "I", "W")
_KINDS = (*_COMPUTE, "SEND_F", "RECV_F", "SEND_B", "RECV_B")  # torch also lists what only FSDP needs


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
    return _list_actions(find_schedule(schedule), num_groups, num_stages, num_microbatches)


@lru_cache(maxsize=64)
def _list_actions(
    schedule: PipelineSchedule, num_groups: int, num_stages: int, num_microbatches: int
) -> ScheduleActions:
    stages = [_PlannedStage(index, num_stages, num_groups) for index in range(0, num_stages, num_groups)]
    runtime = _torch._PipelineScheduleRuntime(stages, num_microbatches)
    order = _compute_order(schedule, stages, num_microbatches)
    runtime._prepare_schedule_with_comms({group: _Upcoming(order[group]) for group in sorted(order)})
    lowered = runtime.pipeline_order_with_comms
    listed = tuple(tuple(_from_torch(_select(lowered[group], _KINDS))) for group in range(num_groups))
    _check(schedule, listed)
    return listed


def _compute_order(schedule: PipelineSchedule, stages: list[_PlannedStage], num_microbatches: int) -> dict[int, Any]:
    """Per device group the computing actions of torch's kind, in order; None where torch leaves a gap."""
    if schedule.order is not None:
        first = stages[0]
        texts = schedule.order(first.group_size, first.num_stages, num_microbatches)
        return {group: _parse(text) for group, text in enumerate(texts)}
    made: Any = getattr(_torch, schedule.torch_class)
    if issubclass(made, _torch.PipelineScheduleSingle):
        order = made(stages[0], num_microbatches)._get_pipeline_order()
        return {group: _in_order(order[group]) for group in order}
    with _without_warnings():
        order = _listed_only(made)(stages, num_microbatches).pipeline_order
    return {group: list(_flatten(order[group])) for group in order}


def _parse(text: str) -> list[Any]:
    actions = map(parse_action, text.split())
    return [_torch._Action(stage, _torch._ComputationType(kind), microbatch) for stage, kind, microbatch in actions]


def _flatten(actions: Iterable[Any]) -> Iterator[Any]:
    """`actions` with the parts of what torch would overlap one after the other."""
    for action in actions:
        yield from (action and action.sub_actions) or (action,)


def _from_torch(actions: Iterable[Any]) -> Iterator[Action]:
    return (Action(each.stage_index, each.computation_type.value, each.microbatch_index) for each in actions)


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
def _listed_only(schedule: Any) -> Any:
    """One of torch's schedule classes, without the sends and receives."""

    class Listed(schedule):
        def _prepare_schedule_with_comms(self, *_: Any) -> None:
            """Only `pipeline_order` is needed."""

    return Listed


def _select(actions: Iterable[Any], kinds: tuple[str, ...]) -> Iterable[Any]:
    """Those of torch's actions, some of which are None, that are of these kinds."""
    return (action for action in actions if action is not None and action.computation_type.value in kinds)


def _in_order(actions: Iterable[Any]) -> list[Any]:
    """The computing actions of one stage, its microbatches counted from 0 in each direction.

    torch 2.13's 1F1B lists those of the last stage's forwards from 1 on (its own step loop counts right).
    """
    counts: Counter[str] = Counter()
    numbered: list[Any] = []
    for action in _select(actions, _COMPUTE):
        numbered.append(action._replace(microbatch_index=counts[action.computation_type.value]))
        counts[action.computation_type.value] += 1
    return numbered


def _check(schedule: PipelineSchedule, actions: ScheduleActions) -> None:
    """Raise if the lists are not what the schedule's record says."""
    for group, listed in enumerate(actions):
        for action in listed:
            expected = stage_group(schedule.name, action.stage, len(actions))
            if group != expected:
                raise RuntimeError(f"schedule {schedule.name} lists {action} on device group {group}, not {expected}")
            if action.kind == "I" and not schedule.splits_backward:
                raise RuntimeError(f"schedule {schedule.name} lists {action}, but its record has splits_backward=False")


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
class _PlannedStage:
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
