"""The actions of pipeline schedules as data: which device group runs which action in which order, and when.

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
    "peak_in_flight",
    "schedule_s",
    "seconds_of",
    "simulate_schedule",
    "wire",
]


class Action(NamedTuple):
    """One action of the device group of `stage` for one microbatch.

    `kind` is as in torch.distributed.pipelining: ``"F"`` is a forward, ``"B"`` a whole backward, ``"I"`` the part of
    the backward that computes gradients of the stage's inputs, ``"W"`` the part that computes those of its parameters;
    ``"SEND_F"`` and ``"RECV_F"`` transfer activations, ``"SEND_B"`` and ``"RECV_B"`` their gradients.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        """The text form, as torch writes it: ``"2F0"``."""
        return f"{self.stage}{self.kind}{self.microbatch}"


_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")

ScheduleActions = tuple[tuple[Action, ...], ...]
"""For each device group, its actions in order."""


def parse_action(text: str) -> Action:
    """The inverse of ``str(action)``.

    Raises:
        ValueError: `text` is not an action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a pipeline action such as '2F0' (stage, kind, microbatch)")
    return Action(int(match[1]), match[2], int(match[3]))


class ScheduleSource(Protocol):
    """A function that returns action lists: `autopar.lower.run.schedule_lists.schedule_actions`, or a test's table."""

    def __call__(self, schedule: str, num_groups: int, num_stages: int, num_microbatches: int) -> ScheduleActions:
        """For each device group, all its actions of one step in order."""
        ...


@dataclass(frozen=True)
class StageCost:
    """The cost of a pipeline stage on one device; the first five fields are seconds of one microbatch.

    Args:
        forward_s: F.
        backward_s: B, which is I and W together.
        weight_s: the part of `backward_s` that is W: gradients of parameters.
        send_forward_s: sending the stage's outputs to the next stage (0 if that is on the same group).
        send_backward_s: sending the gradients of its inputs to the previous stage.
        step_s: seconds once per step: gathers and reductions of parameters, the optimizer.
        peak_memory_bytes: peak bytes of a device of its group, including all stages of the group.
        in_flight: the maximum number of microbatches between forward and backward.
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
    """An action with its start and stop; for a RECV, those of the transfer."""

    action: Action
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: for each device group its spans, in the order of its list."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def step_s(self) -> float:
        """The time at which the last action ends."""
        return max((span.stop_s for spans in self.spans for span in spans), default=0.0)


def simulate_schedule(
    actions: ScheduleActions,
    stages: tuple[StageCost, ...],
    seconds: Sequence[float] = (),
    begins_s: Sequence[float] = (),
) -> Timeline:
    """Simulate when every action runs if each group works through its list in order.

    Sends don't block the sender.  A transfer starts when both its SEND and its RECV have been reached and the link
    between these two groups is free in this direction; F, B and I wait for their inputs.

    Args:
        actions: the schedule.
        stages: the cost of each stage.
        seconds: if given, the seconds of each F, B, I and W instead of those of `stages`, in one sequence for the
            actions of all groups (entries of other actions are ignored).
        begins_s: for each group, when its first action may start; 0 by default.

    Raises:
        ValueError: the lists deadlock.
    """
    starts, stops = _run(wire(actions), stages, seconds, begins_s)
    spans = map(Span, itertools.chain.from_iterable(actions), starts, stops)
    return Timeline(tuple(tuple(itertools.islice(spans, len(group_actions))) for group_actions in actions))


def schedule_s(actions: ScheduleActions, stages: tuple[StageCost, ...], begins_s: Sequence[float] = ()) -> float:
    """The `Timeline.step_s` of `simulate_schedule`, without making the timeline.

    Raises:
        ValueError: the lists deadlock.
    """
    _, stops = _run(wire(actions), stages, begins_s=begins_s)
    return max(stops)


def _run(
    wiring: Wiring, stages: tuple[StageCost, ...], seconds: Sequence[float] = (), begins_s: Sequence[float] = ()
) -> tuple[list[float], list[float]]:
    """The start and stop of every action."""
    costs = [cost_s for stage in stages for cost_s in seconds_of(stage)]
    starts = [0.0] * (wiring.num_actions + 1)  # the last entry stands for an action without input, which is at 0
    stops = [0.0] * (wiring.num_actions + 1)
    clocks = list(begins_s) or [0.0] * wiring.num_groups
    free = [0.0] * wiring.num_links  # when each link is free again
    for event, index, actor, cost, read in wiring.events:  # 10,000 iterations in a large search: no calls in here
        if event == COMPUTE:
            start, ready = clocks[actor], stops[read]
            if ready > start:
                start = ready
            clocks[actor] = stops[index] = start + (seconds[index] if seconds else costs[cost])
            starts[index] = start
        elif event == REACH:
            starts[index] = stops[index] = clocks[actor]
        else:
            start, ready, free_s = starts[index], stops[read], free[actor]
            if ready > start:
                start = ready
            if free_s > start:
                start = free_s
            free[actor] = stops[index] = start + costs[cost]
            starts[index] = start
    return starts, stops


def peak_in_flight(
    actions: ScheduleActions, saved_bytes: tuple[float, ...], weight_bytes: tuple[float, ...]
) -> tuple[float, ...]:
    """For each device group, the peak of the bytes that its stages keep between forward and backward.

    Args:
        actions: the schedule.
        saved_bytes: for each stage, the bytes that one microbatch keeps from its F on; B frees all of them.
        weight_bytes: for each stage, the bytes that W frees: what I keeps of `saved_bytes`, and what I adds.
    """
    changes = {
        "F": saved_bytes,
        "B": [-saved for saved in saved_bytes],
        "I": [weight - saved for saved, weight in zip(saved_bytes, weight_bytes, strict=True)],
        "W": [-weight for weight in weight_bytes],
    }
    peaks: list[float] = []
    for group_actions in actions:
        differences = (changes[kind][stage] for stage, kind, _ in group_actions if kind in changes)
        peaks.append(max(itertools.accumulate(differences, initial=0.0)))
    return tuple(peaks)


# An event of a wiring: (event, index, actor, cost, read).
_Event = tuple[int, int, int, int, int]
COMPUTE = 0  # F, B, I or W `index` on group `actor`, with the seconds of `cost`, after RECV `read`
REACH = 1  # group `actor` reaches SEND or RECV `index`
TRANSFER = 2  # RECV `index` over link `actor`, with the seconds of `cost`, after SEND `read`

_COMPUTING = ("F", "B", "I", "W")
COSTS = {"F": 0, "B": 1, "I": 2, "W": 3, "SEND_F": 4, "SEND_B": 5}
"""Kind of action -> its place in `seconds_of`.  A `cost` of an event is ``len(COSTS) * stage + COSTS[kind]``."""
_AFTER = {"W": "B", "SEND_F": "F", "SEND_B": "B"}  # kind of action -> the kind of its own stage that it waits for


def seconds_of(cost: StageCost) -> tuple[float, ...]:
    """The seconds of a stage's actions, in the order of `COSTS`."""
    inputs_s = cost.backward_s - cost.weight_s
    sends_s = (cost.send_forward_s, cost.send_backward_s)
    return (cost.forward_s, cost.backward_s, inputs_s, cost.weight_s, *sends_s)


class Wiring(NamedTuple):
    """The dependencies of lists of actions, which don't depend on seconds.

    `events` are in topological order: each comes after those that it waits for.  The `index` of an action counts
    through the lists of all groups.
    """

    events: list[_Event]
    num_actions: int
    num_groups: int
    num_links: int


@lru_cache(maxsize=16)
def wire(actions: ScheduleActions) -> Wiring:
    """Find out which actions of these lists wait for which.

    Raises:
        ValueError: the lists deadlock.
    """
    return _WiringBuilder(actions).wire()


class _WiringBuilder:
    """Works through the lists of all groups; each advances until it waits for an action of another list."""

    def __init__(self, actions: ScheduleActions) -> None:
        self.actions = actions
        self.group_of = {action.stage: group for group, listing in enumerate(actions) for action in listing}
        self.last_stage = max(self.group_of, default=0)
        self.num_actions = sum(map(len, actions))
        self.offsets = list(itertools.accumulate(map(len, actions), initial=0))
        self.positions = [0] * len(actions)
        self.indices: dict[Action, int] = {}  # the SENDs and RECVs that have been reached
        self.done: set[Action] = set()  # actions whose results may be read: computed, or transferred
        self.links: dict[tuple[int, int], int] = {}
        self.events: list[_Event] = []
        self.waiting: dict[Action, int] = {}  # an action that isn't done -> the group that waits for it

    def wire(self) -> Wiring:
        """Build the wiring; raises ValueError if some list can't go on."""
        to_visit = list(reversed(range(len(self.actions))))
        while to_visit:
            self._advance(to_visit.pop(), to_visit)
        if self.waiting:
            stuck = "; ".join(
                f"group {group} waits in {self.actions[group][self.positions[group]]} for {missing}"
                for missing, group in self.waiting.items()
            )
            raise ValueError(f"the schedule never ends: {stuck}")
        return Wiring(self.events, self.num_actions, len(self.actions), len(self.links))

    def _advance(self, group: int, to_visit: list[int]) -> None:
        actions = self.actions[group]
        for position in range(self.positions[group], len(actions)):
            action = actions[position]
            missing = [dependency for dependency in self._dependencies(action, group) if dependency not in self.done]
            if missing:
                self.positions[group] = position
                self.waiting[missing[0]] = group
                return
            add_events = self._compute if action.kind in _COMPUTING else self._reach
            completed = add_events(action, group, self.offsets[group] + position)
            if completed is None:
                continue
            self.done.add(completed)
            if completed in self.waiting:
                to_visit.append(self.waiting.pop(completed))

    def _dependencies(self, action: Action, group: int) -> tuple[Action, ...]:
        """The actions that must be done before `action`."""
        stage, kind, microbatch = action
        if kind == "F":
            return () if stage == 0 else (self._input(stage, "F", microbatch, group),)
        if kind in ("B", "I"):
            forward = Action(stage, "F", microbatch)
            return (forward,) if stage == self.last_stage else (forward, self._input(stage, "B", microbatch, group))
        return (Action(stage, _AFTER[kind], microbatch),) if kind in _AFTER else ()

    def _input(self, stage: int, direction: str, microbatch: int, group: int) -> Action:
        """The action that provides the input of a stage's F (or B): that of its neighbor on this group, or a RECV."""
        neighbor = stage - 1 if direction == "F" else stage + 1
        if self.group_of.get(neighbor) == group:
            return Action(neighbor, direction, microbatch)
        return Action(stage, f"RECV_{direction}", microbatch)

    def _compute(self, action: Action, group: int, index: int) -> Action:
        """Add the event of an action that computes, and return the action that is done then: B for I."""
        stage, kind, microbatch = action
        received = Action(stage, "RECV_F" if kind == "F" else "RECV_B", microbatch)
        read = self.num_actions if kind == "W" else self.indices.get(received, self.num_actions)
        self.events.append((COMPUTE, index, group, len(COSTS) * stage + COSTS[kind], read))
        return Action(stage, "B", microbatch) if kind == "I" else action

    def _reach(self, action: Action, group: int, index: int) -> Action | None:
        """Add the events of a SEND or RECV; returns the RECV of the transfer if both sides have been reached."""
        stage, kind, microbatch = action
        self.events.append((REACH, index, group, 0, 0))
        self.indices[action] = index
        side, direction = kind.split("_")
        step = 1 if (side == "SEND") == (direction == "F") else -1
        counterpart = Action(stage + step, f"{'RECV' if side == 'SEND' else 'SEND'}_{direction}", microbatch)
        if counterpart not in self.indices:
            return None
        sent, received = (action, counterpart) if side == "SEND" else (counterpart, action)
        link = self.links.setdefault((self.group_of[sent.stage], self.group_of[received.stage]), len(self.links))
        cost = len(COSTS) * sent.stage + COSTS[sent.kind]
        self.events.append((TRANSFER, self.indices[received], link, cost, self.indices[sent]))
        return received


def count_flights(actions: ScheduleActions, num_stages: int) -> tuple[int, ...]:
    """For each stage, the maximum number of microbatches between their forward and the end of their backward."""
    in_flight, peaks = Counter[int](), [0] * num_stages
    for action in itertools.chain.from_iterable(actions):
        if action.kind == "F":
            in_flight[action.stage] += 1
            peaks[action.stage] = max(peaks[action.stage], in_flight[action.stage])
        elif action.kind in ("B", "W"):
            in_flight[action.stage] -= 1
    return tuple(peaks)
