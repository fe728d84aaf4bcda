"""The actions of pipeline schedules as data: which device group runs which action in which order, and when that is.

`lower/run/schedule_lists.py` makes the lists of a schedule (`autopar.schedules`); the search simulates them here and
the runtime executes the same lists.  No torch.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

__all__ = [
    "COMPUTE",
    "COSTS",
    "REACH",
    "Action",
    "ScheduleActions",
    "ScheduleSource",
    "Span",
    "StageCost",
    "Timeline",
    "Wiring",
    "count_flights",
    "parse_action",
    "peak_held",
    "schedule_s",
    "seconds_of",
    "simulate_schedule",
    "wire",
]


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
    """Where action lists come from: `autopar.lower.run.schedule_lists.schedule_actions`, or a test's table."""

    def __call__(self, schedule: str, num_groups: int, num_stages: int, num_microbatches: int) -> ScheduleActions:
        """Per device group, everything that it does in one step, in order."""
        ...


@dataclass(frozen=True)
class StageCost:
    """What a pipeline stage costs on one device; the first five fields are seconds of one microbatch.

    Args:
        forward_s: F.
        backward_s: B, which is I and W together.
        weight_s: the part of `backward_s` that is W: gradients of parameters.
        send_forward_s: sending the stage's outputs to the next stage (0 if that is on the same group).
        send_backward_s: sending the gradients of its inputs to the stage before.
        step_s: seconds once per step: gathers and reductions of parameters, the optimizer.
        peak_memory_bytes: peak bytes of a device of its group, of all the group's stages together.
        in_flight: the most microbatches that are between forward and backward in it.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    step_s: float = 0.0
    peak_memory_bytes: float = 0.0
    in_flight: int = 0


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


def simulate_schedule(
    actions: ScheduleActions,
    stages: tuple[StageCost, ...],
    seconds: Sequence[float] = (),
    begins_s: Sequence[float] = (),
) -> Timeline:
    """When every action runs, each group working through its list in order.

    Sends don't hold the sender up.  A transfer starts when both its SEND and its RECV have been reached and the link of
    these two groups in this direction is free; F, B and I wait for what they read.

    Args:
        actions: the schedule.
        stages: what each stage takes.
        seconds: if given, what each action takes (F, B, I, W; the others not), instead of what `stages` says; the
            actions of all groups one after the other.
        begins_s: per group, what it does before the first of its actions; by default nothing.

    Raises:
        ValueError: the lists wait for each other for ever.
    """
    starts, stops = _run(wire(actions), stages, seconds, begins_s)
    timed = map(Span, itertools.chain.from_iterable(actions), starts, stops)
    return Timeline(tuple(tuple(itertools.islice(timed, len(listed))) for listed in actions))


def schedule_s(actions: ScheduleActions, stages: tuple[StageCost, ...]) -> float:
    """When the last action ends (`Timeline.step_s` of `simulate_schedule`), without a timeline.

    Raises:
        ValueError: the lists wait for each other for ever.
    """
    _, stops = _run(wire(actions), stages)
    return max(stops)


def _run(
    wiring: Wiring, stages: tuple[StageCost, ...], seconds: Sequence[float] = (), begins_s: Sequence[float] = ()
) -> tuple[list[float], list[float]]:
    """When every action starts and stops."""
    costs = [s for times in stages for s in seconds_of(times)]
    starts = [0.0] * (wiring.num_actions + 1)  # the last one is what nobody waits for
    stops = [0.0] * (wiring.num_actions + 1)
    clocks = list(begins_s) or [0.0] * wiring.num_groups
    free = [0.0] * wiring.num_links
    for event, index, actor, cost, read in wiring.events:
        if event == COMPUTE:
            start = max(clocks[actor], stops[read])
            clocks[actor] = stops[index] = start + (seconds[index] if seconds else costs[cost])
            starts[index] = start
        elif event == REACH:
            starts[index] = stops[index] = clocks[actor]
        else:
            start = max(starts[index], stops[read], free[actor])
            free[actor] = stops[index] = start + costs[cost]
            starts[index] = start
    return starts, stops


def peak_held(
    actions: ScheduleActions, held_bytes: tuple[float, ...], weight_bytes: tuple[float, ...]
) -> tuple[float, ...]:
    """Per device group, the most bytes that its stages hold at once between forward and backward.

    Args:
        actions: the schedule.
        held_bytes: per stage, what one microbatch keeps from its F on.
        weight_bytes: per stage, what W gives up: the part of this that I leaves, and what I adds (B gives up all).
    """
    changes = {
        "F": held_bytes,
        "B": [-held for held in held_bytes],
        "I": [weight - held for held, weight in zip(held_bytes, weight_bytes, strict=True)],
        "W": [-weight for weight in weight_bytes],
    }
    peaks: list[float] = []
    for listed in actions:
        now = (changes[kind][stage] for stage, kind, _ in listed if kind in changes)
        peaks.append(max(itertools.accumulate(now, initial=0.0)))
    return tuple(peaks)


# Events of a wiring: (event, index, actor, cost, read).
_Event = tuple[int, int, int, int, int]
COMPUTE = 0  # F, B, I or W `index` on group `actor`, taking seconds `cost`, after RECV `read`
REACH = 1  # group `actor` comes to SEND or RECV `index`
TRANSFER = 2  # RECV `index` over link `actor`, taking seconds `cost`, after SEND `read`

_COMPUTED = ("F", "B", "I", "W")
COSTS = {"F": 0, "B": 1, "I": 2, "W": 3, "SEND_F": 4, "SEND_B": 5}
_AFTER = {"W": "B", "SEND_F": "F", "SEND_B": "B"}  # what of its own stage an action comes after


def seconds_of(times: StageCost) -> tuple[float, ...]:
    """In the order of `COSTS`."""
    inputs_s = times.backward_s - times.weight_s
    sends_s = (times.send_forward_s, times.send_backward_s)
    return (times.forward_s, times.backward_s, inputs_s, times.weight_s, *sends_s)


class Wiring(NamedTuple):
    """Everything about lists of actions that doesn't depend on seconds.

    `events` are in an order in which each comes after what it waits for.  An action's `index` counts through all lists.
    """

    events: list[_Event]
    num_actions: int
    num_groups: int
    num_links: int


@lru_cache(maxsize=16)
def wire(actions: ScheduleActions) -> Wiring:
    """What waits for what in these lists.

    Raises:
        ValueError: they wait for each other for ever.
    """
    return _Wirer(actions).wire()


class _Wirer:
    """Works through all lists at once, each as far as it goes, until another list has done what it waits for."""

    def __init__(self, actions: ScheduleActions) -> None:
        self.actions = actions
        self.group_of = {action.stage: group for group, listed in enumerate(actions) for action in listed}
        self.last_stage = max(self.group_of, default=0)
        self.num_actions = sum(map(len, actions))
        self.offsets = list(itertools.accumulate(map(len, actions), initial=0))
        self.positions = [0] * len(actions)
        self.indices: dict[Action, int] = {}  # of the SENDs and RECVs that have been reached
        self.there: set[Action] = set()  # what may be read: computed, or transferred
        self.links: dict[tuple[int, int], int] = {}
        self.events: list[_Event] = []
        self.waiting: dict[Action, int] = {}

    def wire(self) -> Wiring:
        """The wiring, or ValueError if some list can't go on."""
        to_visit = list(reversed(range(len(self.actions))))
        while to_visit:
            self._advance(to_visit.pop(), to_visit)
        if self.waiting:
            stuck = "; ".join(
                f"group {group} waits in {self.actions[group][self.positions[group]]} for {wanted}"
                for wanted, group in self.waiting.items()
            )
            raise ValueError(f"the schedule never ends: {stuck}")
        return Wiring(self.events, self.num_actions, len(self.actions), len(self.links))

    def _advance(self, group: int, to_visit: list[int]) -> None:
        listed = self.actions[group]
        for position in range(self.positions[group], len(listed)):
            action = listed[position]
            missing = [wanted for wanted in self._reads(action, group) if wanted not in self.there]
            if missing:
                self.positions[group] = position
                self.waiting[missing[0]] = group
                return
            happen = self._compute if action.kind in _COMPUTED else self._reach
            arrived = happen(action, group, self.offsets[group] + position)
            if arrived is None:
                continue
            self.there.add(arrived)
            if arrived in self.waiting:
                to_visit.append(self.waiting.pop(arrived))

    def _reads(self, action: Action, group: int) -> tuple[Action, ...]:
        """What must be there before `action`."""
        stage, kind, microbatch = action
        if kind == "F":
            return () if stage == 0 else (self._input(stage, "F", microbatch, group),)
        if kind in ("B", "I"):
            own = Action(stage, "F", microbatch)
            return (own,) if stage == self.last_stage else (own, self._input(stage, "B", microbatch, group))
        return (Action(stage, _AFTER[kind], microbatch),) if kind in _AFTER else ()

    def _input(self, stage: int, direction: str, microbatch: int, group: int) -> Action:
        """What gives a stage what its F (or its B) reads."""
        neighbour = stage - 1 if direction == "F" else stage + 1
        if self.group_of.get(neighbour) == group:
            return Action(neighbour, direction, microbatch)
        return Action(stage, f"RECV_{direction}", microbatch)

    def _compute(self, action: Action, group: int, index: int) -> Action:
        """Returns what is there now, I counting as B."""
        stage, kind, microbatch = action
        received = Action(stage, "RECV_F" if kind == "F" else "RECV_B", microbatch)
        read = self.num_actions if kind == "W" else self.indices.get(received, self.num_actions)
        self.events.append((COMPUTE, index, group, len(COSTS) * stage + COSTS[kind], read))
        return Action(stage, "B", microbatch) if kind == "I" else action

    def _reach(self, action: Action, group: int, index: int) -> Action | None:
        """Returns the RECV that is there now, if both sides have been reached."""
        stage, kind, microbatch = action
        self.events.append((REACH, index, group, 0, 0))
        self.indices[action] = index
        way, direction = kind.split("_")
        step = 1 if (way == "SEND") == (direction == "F") else -1
        other = Action(stage + step, f"{'RECV' if way == 'SEND' else 'SEND'}_{direction}", microbatch)
        if other not in self.indices:
            return None
        sent, received = (action, other) if way == "SEND" else (other, action)
        link = self.links.setdefault((self.group_of[sent.stage], self.group_of[received.stage]), len(self.links))
        cost = len(COSTS) * sent.stage + COSTS[sent.kind]
        self.events.append((TRANSFER, self.indices[received], link, cost, self.indices[sent]))
        return received


def count_flights(actions: ScheduleActions, num_stages: int) -> tuple[int, ...]:
    """Per stage, the most microbatches between their forward and the end of their backward."""
    held, most = Counter[int](), [0] * num_stages
    for listed in actions:
        for action in listed:
            if action.kind == "F":
                held[action.stage] += 1
                most[action.stage] = max(most[action.stage], held[action.stage])
            elif action.kind in ("B", "W"):
                held[action.stage] -= 1
    return tuple(most)
