"""Pipeline schedules as torch.distributed.pipelining knows them: their action lists, and its runtime to run a list.

torch's schedule classes and its runtime want stage objects.  For the lists these are `_PlannedStage`, which only say
which stage they are; for a run `_DrivenStage`, which hand every action on to a `StageWork`.  So no model, shape
inference, process group or P2P operation of torch.distributed.pipelining takes part.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

from torch.distributed.pipelining import schedules as torch_schedules

from autopar.lower.communication.failures import naming_failures
from autopar.schedule import Action, ScheduleActions, schedule_problem, stage_group

__all__ = ["StageWork", "backward_actions", "forward_actions", "run_schedule", "schedule_actions"]

_torch: Any = torch_schedules  # private classes and incomplete annotations

_COMPUTE = ("F", "B", "I", "W")
_FORWARD = ("F", "SEND_F", "RECV_F")
_KINDS = (*_COMPUTE, "SEND_F", "RECV_F", "SEND_B", "RECV_B")  # torch also lists what only FSDP needs
_MULTIPLE = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
_SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


class StageWork(Protocol):
    """What one stage does at each action; its rank's tensors of each microbatch are its own business.

    Sends and receives only start; `forward` and the backward methods wait for what they read.  Whoever made the works
    waits for their sends when the schedule has run.
    """

    def forward(self, microbatch: int) -> None:
        """F."""
        ...

    def backward(self, microbatch: int) -> None:
        """B, which is `backward_inputs` and `backward_weights` in one."""
        ...

    def backward_inputs(self, microbatch: int) -> None:
        """I: the gradients of what the stage received."""
        ...

    def backward_weights(self, microbatch: int) -> None:
        """W: the gradients of the stage's parameters; always after `backward_inputs`."""
        ...

    def send_forward(self, microbatch: int) -> None:
        """Start to send what `forward` computed to the next stage."""
        ...

    def receive_forward(self, microbatch: int) -> None:
        """Start to receive what `forward` reads."""
        ...

    def send_backward(self, microbatch: int) -> None:
        """Start to send the gradients of what the stage received to the stage before."""
        ...

    def receive_backward(self, microbatch: int) -> None:
        """Start to receive the gradients that the backward methods read."""
        ...

    def take_forward(self, microbatch: int, previous: StageWork) -> None:
        """Instead of `receive_forward`, after `previous` on the same device group has run its forward."""
        ...

    def take_backward(self, microbatch: int, following: StageWork) -> None:
        """Instead of `receive_backward`, after `following` on the same device group has run its backward."""
        ...


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
    stages = [_PlannedStage(index * num_groups, num_stages, num_groups) for index in range(rounds)]
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


def forward_actions(actions: ScheduleActions) -> ScheduleActions:
    """The part of `actions` that computes outputs."""
    return tuple(tuple(action for action in group if action.kind in _FORWARD) for group in actions)


def backward_actions(actions: ScheduleActions) -> ScheduleActions:
    """What `forward_actions` leaves out."""
    return tuple(tuple(action for action in group if action.kind not in _FORWARD) for group in actions)


def run_schedule(
    actions: ScheduleActions, group: int, works: Mapping[int, StageWork], *, rank: int | None = None
) -> None:
    """Run device group `group`'s list on torch's pipeline runtime.

    Args:
        actions: from `schedule_actions`, `forward_actions` or `backward_actions`.
        group: this rank's device group.
        works: stage -> what it does, for all stages of this group.
        rank: this rank, for messages.

    Raises:
        PipelineError: an action failed; its cause is what the `StageWork` raised.  An `AutoparError` passes as it is,
            with a note that names the action.
    """
    own = actions[group]
    missing = {action.stage for action in own} - set(works)
    if missing:
        raise ValueError(f"device group {group} runs stages {sorted(missing)}, for which there is no work")
    if not own:
        return
    num_stages = 1 + max(action.stage for listed in actions for action in listed)
    who = f"device group {group}" if rank is None else f"rank {rank} (device group {group})"
    stages = [_DrivenStage(index, num_stages, len(actions), group, who, works[index]) for index in sorted(works)]
    runtime = _Runtime(stages, 1 + max(action.microbatch for action in own))
    runtime.run(
        [_torch._Action(action.stage, _torch._ComputationType(action.kind), action.microbatch) for action in own]
    )


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
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


class _DrivenStage(_PlannedStage):
    """The stage interface that torch's runtime calls, on top of a `StageWork`.

    What torch would move (operations to batch, chunks of output) is empty or the work itself.
    """

    def __init__(self, index: int, num_stages: int, num_groups: int, group: int, who: str, work: StageWork) -> None:
        """`who` runs it, for messages."""
        super().__init__(index, num_stages, num_groups, group)
        self._who = who
        self._work = work

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> StageWork:
        """F."""
        self._run("F", microbatch, self._work.forward)
        return self._work

    def backward_one_chunk(self, microbatch: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
        """B or I."""
        if full_backward:
            self._run("B", microbatch, self._work.backward)
        else:
            self._run("I", microbatch, self._work.backward_inputs)

    def backward_weight_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        """W."""
        self._run("W", microbatch, self._work.backward_weights)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        """SEND_F."""
        return self._run("SEND_F", microbatch, self._work.send_forward)

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        """RECV_F."""
        return self._run("RECV_F", microbatch, self._work.receive_forward)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        """SEND_B."""
        return self._run("SEND_B", microbatch, self._work.send_backward)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        """RECV_B."""
        return self._run("RECV_B", microbatch, self._work.receive_backward)

    def set_local_fwd_input(self, previous: StageWork, microbatch: int) -> None:
        """The stage before, on the same group, has run its F."""
        self._run("F", microbatch, lambda number: self._work.take_forward(number, previous))

    def get_local_bwd_output(self, microbatch: int) -> StageWork:
        """What the stage before, on the same group, takes its gradients from."""
        return self._work

    def set_local_bwd_input(self, following: StageWork, microbatch: int) -> None:
        """The next stage, on the same group, has run its B or I."""
        self._run("B", microbatch, lambda number: self._work.take_backward(number, following))

    def _run(self, kind: str, microbatch: int, act: Callable[[int], None]) -> list[Any]:
        """Returns the operations that are left to torch: none."""
        with naming_failures(self._who, Action(self.stage_index, kind, microbatch)):
            act(microbatch)
        return []


class _Runtime(_torch._PipelineScheduleRuntime):
    """torch's loop over a list of actions, without its preparation of stages."""

    def run(self, actions: list[Any]) -> None:
        """Run `actions`, one after the other."""
        # torch would only store them, after checks that a list of forwards alone doesn't pass
        self.pipeline_order_with_comms = {group: [] for group in range(self.pp_group_size)} | {self.rank: actions}
        self._step_microbatches()

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Nothing to infer or to warm up."""
