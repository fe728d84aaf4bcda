"""A step of a plan, event by event: `simulate_step`.

Each device group works through its list of actions (without stages: a forward and a backward for every microbatch).
Inside an action its layers run one after the other on two streams (`streams`):

- forward: the next layer's parameters are gathered while a layer computes;
- backward: the parameters of the layer before likewise, where ZeRO-3 gathers them anew, and gradients are reduced
  while the layers before compute their backward, and later actions theirs;
- collectives of activations are waited for where they are needed.

Parameters below ZeRO-3 are gathered in the stage's first forward, gradients below ZeRO-2 reduced in its last backward.
At the end all groups are told the loss, wait for what is still under way, exchange the gradients of tied parameters,
and run the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.plan import Plan
from autopar.program import Program
from autopar.schedule import Action, ScheduleSource, StageTimes, Timeline, simulate_schedule
from autopar.search.prices import Prices
from autopar.search.simulation.steps import StepWork, step_work
from autopar.search.simulation.streams import Backlog, Ran, Streams
from autopar.search.simulation.work import Item, LayerWork
from autopar.search.training import TrainingSpec
from autopar.timeline import Event, StepTimeline

__all__ = ["MAX_EVENTS", "simulate_step"]

MAX_EVENTS = 200_000
"""Above so many events of layers, a timeline shows whole actions."""

_CATEGORIES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def simulate_step(
    program: Program,
    plan: Plan,
    prices: Prices,
    training: TrainingSpec,
    schedules: ScheduleSource,
    *,
    detail: str = "",
) -> StepTimeline:
    """One training step by `plan`, as it is expected to pass.

    Args:
        program: that the plan fits.
        plan: any plan.
        prices: of the devices that it runs on.
        training: how it is trained.
        schedules: where the action lists of its schedule come from.
        detail: ``"layers"``: an event for each piece of a layer and each collective.  ``"actions"``: one for what a
            stage computes for one microbatch, one for all its collectives, one for each transfer.  ``"none"``: no
            events, only the seconds.  ``""``: layers, as long as these are at most `MAX_EVENTS` events.

    Returns:
        The step's seconds, the same for every `detail`, and the events of every device group.
    """
    simulation = _Simulation(step_work(program, plan, prices, training, schedules))
    step_s = simulation.run()
    if not detail:
        detail = "layers" if simulation.num_events <= MAX_EVENTS else "actions"
    events = () if detail == "none" else tuple(simulation.events(by_action=detail == "actions"))
    return StepTimeline(step_s, events, memory_limit_bytes=plan.memory_limit_bytes)


class _Outcome(NamedTuple):
    """What an action makes of the backlog that it finds."""

    seconds: float
    ran: tuple[Ran, ...]
    backlog: Backlog


class _Instance(NamedTuple):
    """Something that ran on a group's two streams from `start_s` on."""

    group: int
    start_s: float
    seconds: float
    ran: tuple[Ran, ...]
    action: Action | None


@dataclass
class _Group:
    """Where a device group is: the end of what it did last, and what is under way."""

    now_s: float = 0.0
    backlog: Backlog = field(default_factory=Backlog)


class _Simulation:
    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.actions = [action for listed in work.actions for action in listed]
        self.groups = [_Group() for _ in work.actions]
        self.instances: list[_Instance] = []
        self.between: list[tuple[int, Ran]] = []  # on the pipeline stream of a group, at the end of the step
        self.timeline = Timeline(())
        self.first_forward: dict[int, Action] = {}
        self.last_backward: dict[int, Action] = {}
        for action in self.actions:
            if action.kind == "F":
                self.first_forward.setdefault(action.stage, action)
            if action.kind in ("B", "W"):
                self.last_backward[action.stage] = action
        self._known: dict[tuple[object, ...], _Outcome] = {}

    @property
    def num_events(self) -> int:
        """How many events there are of layers."""
        return sum(len(instance.ran) for instance in self.instances)

    def run(self) -> float:
        """The step's seconds."""
        stages = tuple(
            StageTimes(0.0, 0.0, 0.0, _seconds(ahead), _seconds(back))
            for ahead, back in zip(self.work.sends, self.work.sends_back, strict=True)
        )
        self.timeline = simulate_schedule(self.work.actions, stages, self._time)
        done_s = max(group.now_s for group in self.groups)
        for number in range(len(self.groups)):
            self._tell(number, done_s)
        for groups, items in self.work.ties:
            self._exchange(groups, items)
        for number in range(len(self.groups)):
            self._optimize(number)
        return max(group.now_s for group in self.groups)

    def _time(self, group: int, index: int, start_s: float) -> float:
        """`ActionTiming`."""
        self._idle_until(group, start_s)
        action, state = self.actions[index], self.groups[group]
        is_first = self.first_forward.get(action.stage) == action
        is_last = self.last_backward.get(action.stage) == action
        key = (action.stage, action.kind, is_first, is_last, state.backlog.key)
        if key not in self._known:
            streams = Streams(state.backlog)
            self._act(streams, action, is_first, is_last)
            self._known[key] = _Outcome(streams.now_s, tuple(streams.ran), streams.backlog)
        outcome = self._known[key]
        self.instances.append(_Instance(group, start_s, outcome.seconds, outcome.ran, action))
        state.now_s, state.backlog = start_s + outcome.seconds, outcome.backlog
        return outcome.seconds

    def _act(self, streams: Streams, action: Action, is_first: bool, is_last: bool) -> None:
        layers = self.work.layers[self.work.ranges[action.stage].start : self.work.ranges[action.stage].stop]
        if action.kind == "F":
            _forward(streams, layers, is_first)
        else:
            _backward(streams, layers[::-1], action.kind, is_last)

    def _idle_until(self, group: int, time_s: float) -> None:
        state = self.groups[group]
        if state.backlog.items and time_s > state.now_s:
            streams = Streams(state.backlog)
            streams.idle(time_s - state.now_s)
            self._keep(group, streams)
        state.now_s = max(state.now_s, time_s)

    def _keep(self, group: int, streams: Streams) -> None:
        """What happened outside of any action."""
        state = self.groups[group]
        if streams.ran:
            self.instances.append(_Instance(group, state.now_s, streams.now_s, tuple(streams.ran), None))
        state.now_s += streams.now_s
        state.backlog = streams.backlog

    def _tell(self, group: int, start_s: float) -> None:
        """Broadcasts, for which all groups must be there; then what the group itself has to finish."""
        state = self.groups[group]
        for item in self.work.told:
            self._idle_until(group, start_s)
            start_s += item.seconds
            self.between.append((group, Ran(item, state.now_s, start_s)))
            self._idle_until(group, start_s)
        streams = Streams(state.backlog)
        streams.wait_for_all()
        for item in self.work.at_end[group]:
            streams.run(item)
        self._keep(group, streams)

    def _exchange(self, groups: Sequence[int], items: Sequence[Item]) -> None:
        start_s = max(self.groups[group].now_s for group in groups)
        for group in groups:
            now_s = start_s
            for item in items:
                self.between.append((group, Ran(item, now_s, now_s + item.seconds)))
                now_s += item.seconds
            self.groups[group].now_s = now_s

    def _optimize(self, group: int) -> None:
        streams = Streams()
        for layers, own in zip(self.work.ranges, self.work.groups, strict=True):
            if own == group:
                for item in self.work.optimizer[layers.start : layers.stop]:
                    if item.seconds:
                        streams.run(item)
        self._keep(group, streams)

    def events(self, *, by_action: bool) -> Iterator[Event]:
        """Everything that ran."""
        for instance in self.instances:
            if by_action and instance.action is not None:
                yield from _joined(instance, instance.action)
            else:
                microbatch = instance.action.microbatch if instance.action else -1
                for ran in instance.ran:
                    yield _event(instance.group, ran, microbatch, instance.start_s)
        for group, ran in self.between:
            yield _event(group, ran, -1)
        for spans in self.timeline.spans:
            for span in spans:
                yield from self._transfer(span.action, span.start_s, span.stop_s, by_action)

    def _transfer(self, action: Action, start_s: float, stop_s: float, by_action: bool) -> Iterator[Event]:
        """The sends behind a RECV, on the sender's side."""
        if action.kind not in ("RECV_F", "RECV_B"):
            return
        is_forward = action.kind == "RECV_F"
        sender = action.stage - 1 if is_forward else action.stage + 1
        items = (self.work.sends if is_forward else self.work.sends_back)[sender]
        group = self.work.groups[sender]
        if by_action and items:
            name = f"stage {sender} to {action.stage}"
            num_bytes = sum(item.num_bytes for item in items)
            yield Event(
                group, "pipeline", name, "send", start_s, stop_s, -1, action.microbatch, num_bytes, items[0].detail
            )
            return
        for item in items:
            yield _event(group, Ran(item, start_s, start_s + item.seconds), action.microbatch)
            start_s += item.seconds


def _forward(streams: Streams, layers: Sequence[LayerWork], is_first: bool) -> None:
    tickets: list[int] = []
    for index, layer in enumerate(layers):
        for ahead in layers[len(tickets) : index + 2]:  # of this layer and the next one
            tickets.append(streams.start(ahead.gathers if ahead.gathers_each or is_first else ()))
        streams.wait(tickets[index])
        for item in layer.forward:
            streams.run(item)


def _backward(streams: Streams, layers: Sequence[LayerWork], kind: str, is_last: bool) -> None:
    """`layers` from the last to the first."""
    tickets: list[int] = []
    for index, layer in enumerate(layers):
        for ahead in layers[len(tickets) : index + 2]:
            tickets.append(streams.start(ahead.gathers if ahead.regathers and kind != "W" else ()))
        streams.wait(tickets[index])
        parts = {"B": (*layer.again, *layer.backward), "I": (*layer.again, *layer.inputs), "W": layer.weights}
        for item in parts[kind]:
            streams.run(item)
        if kind != "I" and (layer.reduces_each or is_last):
            streams.start(layer.reduces)


def _seconds(items: Sequence[Item]) -> float:
    return sum(item.seconds for item in items)


def _event(group: int, ran: Ran, microbatch: int, since_s: float = 0.0) -> Event:
    item, start_s, stop_s = ran
    stream = "compute"
    if item.is_collective:
        stream = "pipeline" if item.category in ("send", "broadcast") else "communication"
    return Event(
        group, stream, item.name, item.category, since_s + start_s, since_s + stop_s, item.layer, microbatch,
        item.num_bytes, item.detail,
    )  # fmt: skip


def _joined(instance: _Instance, action: Action) -> Iterator[Event]:
    """One event for computing, one for all collectives."""
    start_s, stop_s = instance.start_s, instance.start_s + instance.seconds
    name = f"stage {action.stage}"
    yield Event(instance.group, "compute", name, _CATEGORIES[action.kind], start_s, stop_s, -1, action.microbatch)
    collectives = [ran for ran in instance.ran if ran.item.is_collective]
    if collectives:
        longest = max(collectives, key=lambda ran: ran.item.seconds)
        yield Event(
            instance.group,
            "communication",
            name,
            longest.item.category,
            start_s + min(ran.start_s for ran in collectives),
            start_s + max(ran.stop_s for ran in collectives),
            -1,
            action.microbatch,
            sum(ran.item.num_bytes for ran in collectives),
            f"{len(collectives)} collectives",
        )
