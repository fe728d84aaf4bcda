"""Pipeline schedules as data: which device group runs which action in which order, and when that is.

The action lists themselves come from torch.distributed.pipelining (`lower/schedules.py` reads them from its schedule
classes); the search simulates them here and the runtime executes the same lists.  No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = [
    "SCHEDULES",
    "Action",
    "ScheduleActions",
    "ScheduleSource",
    "Span",
    "StageTimes",
    "Timeline",
    "parse_action",
    "peak_held",
    "schedule_problem",
    "simulate_schedule",
    "stage_group",
]

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


class Action(NamedTuple):
    """One thing that the device group of `stage` does for one microbatch.

    `kind` is as torch.distributed.pipelining writes it: ``"F"`` forward, ``"B"`` whole backward, ``"I"`` the part of
    the backward that gives the gradients of the stage's inputs, ``"W"`` the part that gives those of its parameters,
    ``"SEND_F"``, ``"RECV_F"`` activations, ``"SEND_B"``, ``"RECV_B"`` their gradients.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        """As torch writes it: ``"2F0"``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")

# Per device group, in order.
ScheduleActions = tuple[tuple[Action, ...], ...]


def parse_action(text: str) -> Action:
    """The action that ``str(action)`` wrote.

    Raises:
        ValueError: it is none.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no pipeline action such as '2F0' (stage, kind, microbatch)")
    return Action(int(match[1]), match[2], int(match[3]))


class ScheduleSource(Protocol):
    """Where action lists come from: `autopar.lower.schedules.schedule_actions`, or a test's table."""

    def __call__(self, schedule: str, num_groups: int, num_stages: int, num_microbatches: int) -> ScheduleActions:
        """Per device group, everything that it does in one step, in order."""
        ...


def stage_group(schedule: str, stage: int, num_groups: int) -> int:
    """The device group that runs `stage`: round and round, and for zbv there and back again."""
    if schedule == "zbv":
        return stage if stage < num_groups else 2 * num_groups - 1 - stage
    return stage % num_groups


def schedule_problem(schedule: str, num_groups: int, num_stages: int, num_microbatches: int) -> str:
    """Why `schedule` can't run so many stages and microbatches on so many groups; "" if it can."""
    if schedule not in SCHEDULES:
        return f"there is no schedule {schedule!r}; there are {', '.join(SCHEDULES)}"
    if num_groups < 2 or num_stages % num_groups:
        return f"{num_stages} stages can't be dealt out to {num_groups} device groups"
    rounds = num_stages // num_groups
    wanted = {"gpipe": rounds == 1, "1f1b": rounds == 1, "zbv": rounds == 2, "interleaved_1f1b": rounds >= 2}
    if not wanted.get(schedule, True):
        need = {"gpipe": "1", "1f1b": "1", "zbv": "2", "interleaved_1f1b": "2 or more"}[schedule]
        return f"{schedule} needs {need} stages per device group, not {rounds}"
    if schedule == "1f1b" and num_microbatches < num_stages:
        return f"1f1b needs at least as many microbatches as stages, not {num_microbatches} for {num_stages}"
    if schedule.startswith("interleaved") and num_microbatches % max(1, num_microbatches // num_groups):
        return f"{schedule} on {num_groups} device groups can't deal out {num_microbatches} microbatches evenly"
    return ""


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one microbatch takes in one stage.

    Args:
        forward_s: F.
        backward_s: B, which is I and W together.
        weight_s: the part of `backward_s` that is W.
        send_forward_s: what the stage's outputs take to the next stage (0 if that is on the same group).
        send_backward_s: what the gradients of its inputs take to the stage before.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0


class Span(NamedTuple):
    """An action and when it runs; of a RECV the time of the transfer."""

    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: `spans` per device group, in order of the group's list."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_s(self) -> float:
        """When the last action ends."""
        return max((span.stop_s for spans in self.spans for span in spans), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """The share of all groups' time up to `step_s` in which they don't compute."""
        computing = sum(s.stop_s - s.start_s for spans in self.spans for s in spans if s.action.kind in "FBIW")
        return 1 - computing / (self.step_s * len(self.spans)) if self.step_s else 0.0


def simulate_schedule(actions: ScheduleActions, stages: tuple[StageTimes, ...]) -> Timeline:
    """When every action runs, each group working through its list in order.

    Sends don't hold the sender up.  A transfer starts when both its SEND and its RECV have been reached and the link of
    these two groups in this direction is free; F, B and I wait for what they read.

    Raises:
        ValueError: the lists wait for each other for ever.
    """
    raise NotImplementedError


def peak_held(
    actions: ScheduleActions, held_bytes: tuple[float, ...], weight_bytes: tuple[float, ...]
) -> tuple[float, ...]:
    """Per device group, the most bytes that its stages hold at once between forward and backward.

    Args:
        actions: the schedule.
        held_bytes: per stage, what one microbatch keeps from its F on.
        weight_bytes: per stage, the part of this that only W gives up; the rest goes with I (B gives up all).
    """
    raise NotImplementedError
