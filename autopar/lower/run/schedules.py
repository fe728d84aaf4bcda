"""torch's pipeline runtime, to run a list of actions.

It wants stage objects: these are `_DrivenStage`, which hand every action on to a `StageWork`.  So no model, shape
inference, process group or P2P operation of torch.distributed.pipelining takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.distributed.pipelining import schedules as torch_schedules

from autopar.lower.communication.failures import naming_failures
from autopar.lower.run.schedule_lists import PlannedStage
from autopar.schedule import Action, ScheduleActions

__all__ = ["StageWork", "backward_actions", "forward_actions", "run_schedule"]

_torch: Any = torch_schedules  # private classes and incomplete annotations

_FORWARD = ("F", "SEND_F", "RECV_F")


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


class _DrivenStage(PlannedStage):
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
