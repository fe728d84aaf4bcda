"""A step of a plan, event by event: `simulate_step`.

Each device group works through its list of actions (without stages: a forward and a backward for every microbatch).
Inside an action its layers run one after the other on two streams (`streams`), as the runtime has them run:

- Collectives of activations are waited for where they are needed.
- Forward: the next layer's parameters are gathered while a layer computes.  What is gathered once for several
  microbatches (ZeRO-0 and 1) is waited for in the first.  With stages all groups gather at once what they need for the
  whole step, before anything else: else every stage would gather when the first microbatch comes by.
- Backward: the parameters of the layer before are gathered while a layer computes, where ZeRO-3 needs them anew; a
  layer's gradients are reduced while the layer before computes.  What is reduced once (ZeRO-0 and 1) is so in the last
  microbatch, with stages at the end of the step.
- A backward in two parts reduces behind the second one, and waits; a stage that would run something again for the
  second part (ZeRO-3, full recomputation) does everything in the first.

At the end all groups are told the loss, reduce what is left, exchange the gradients of tied parameters, and run the
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from autopar.plan import Plan
from autopar.program import Program
from autopar.schedule import Action, ScheduleSource, StageTimes, Timeline, simulate_schedule
from autopar.step.layer_facts import LayerFacts
from autopar.step.layer_work import Item, LayerWork
from autopar.step.memory import step_memory, timed_memory
from autopar.step.prices import Prices
from autopar.step.step_work import StepWork, step_work
from autopar.step.streams import Ran, Streams
from autopar.step.training import TrainingSpec
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
    schedules: ScheduleSource | None,
    *,
    detail: str = "",
    overhead_bytes: float = 0.0,
    facts: LayerFacts | None = None,
) -> StepTimeline:
    """One training step by `plan`, as it is expected to pass.

    Args:
        program: that the plan fits.
        plan: any plan.
        prices: of the devices that it runs on.
        training: how it is trained.
        schedules: where the action lists of its schedule come from; needed for a plan with stages.
        detail: ``"layers"``: an event for each piece of a layer and each collective.  ``"actions"``: one for what a
            stage computes for one microbatch, one for all its collectives, one for each transfer.  ``"none"``: no
            events, only the seconds.  ``""``: layers, as long as these are at most `MAX_EVENTS` events.
        overhead_bytes: what communicators and the allocator take of a device, beside what the plan may use.
        facts: those of a search with the same arguments.

    Returns:
        The step's seconds, the same for every `detail`; the events and the memory of every device group.
    """
    simulation = _Simulation(step_work(program, plan, prices, training, schedules, facts))
    step_s = simulation.run()
    if not detail:
        detail = "layers" if simulation.num_events <= MAX_EVENTS else "actions"
    events = () if detail == "none" else tuple(simulation.events(by_action=detail == "actions"))
    if not events:
        return StepTimeline(step_s, ())
    memory = step_memory(program, plan, training, schedules, overhead_bytes, facts)
    return StepTimeline(
        step_s, events, timed_memory(memory, events, step_s), plan.memory_limit_bytes + overhead_bytes
    )  # fmt: skip


class _Instance(NamedTuple):
    """Something that ran on a group's two streams from `start_s` on."""

    group: int
    start_s: float
    ran: tuple[Ran, ...]
    action: Action | None


class _Simulation:
    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.actions = [action for listed in work.actions for action in listed]
        self.now_s = [0.0] * len(work.actions)
        self.instances: list[_Instance] = []
        self.between: list[tuple[int, Ran]] = []  # on the pipeline stream of a group, at the end of the step
        self.timeline = Timeline(())
        self.first: set[Action] = set()  # forwards, and the last backwards, of each stage
        self.last: set[Action] = set()
        met: set[tuple[int, bool]] = set()
        for action in self.actions:
            if action.kind == "F" and (action.stage, False) not in met:
                met.add((action.stage, False))
                self.first.add(action)
        for action in reversed(self.actions):
            if action.kind in ("B", "W") and (action.stage, True) not in met:
                met.add((action.stage, True))
                self.last.add(action)
        self.is_split = [work.splits and all(map(_can_split, self._layers(stage))) for stage in range(len(work.ranges))]
        self._known: dict[tuple[object, ...], tuple[tuple[Ran, ...], float]] = {}

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
        ran, seconds = zip(*map(self._run, self.actions), strict=True)
        begins_s = [self._begin(group) for group in range(len(self.now_s))]
        self.timeline = simulate_schedule(self.work.actions, stages, seconds, begins_s)
        spans = ((group, span) for group, listed in enumerate(self.timeline.spans) for span in listed)
        for (group, (action, start_s, stop_s)), run in zip(spans, ran, strict=True):
            if action.kind in _CATEGORIES:
                self.now_s[group] = stop_s
            if run:
                self.instances.append(_Instance(group, start_s, run, action))
        if self.work.told:
            self._tell()
        for group in range(len(self.now_s)):
            self._finish(group)
        for groups, items in self.work.ties:
            self._exchange(groups, items)
        for group in range(len(self.now_s)):
            self._optimize(group)
        return max(self.now_s)

    def _begin(self, group: int) -> float:
        """What a group gathers before everything else; its seconds."""
        streams = Streams()
        for stage, own in enumerate(self.work.groups):
            if own == group and self.work.gathers_first:
                for layer in self._layers(stage):
                    for item in () if layer.gathers_each else layer.gathers:
                        streams.run(item)
        self._keep(group, tuple(streams.ran))
        return self.now_s[group]

    def _layers(self, stage: int) -> Sequence[LayerWork]:
        own = self.work.ranges[stage]
        return self.work.layers[own.start : own.stop]

    def _run(self, action: Action) -> tuple[tuple[Ran, ...], float]:
        """What a group does in this action, from second 0 on, and until when."""
        if action.kind not in _CATEGORIES:
            return (), 0.0
        key = (action.stage, action.kind, action in self.first, action in self.last)
        if key not in self._known:
            streams = Streams()
            self._act(streams, action)
            self._known[key] = tuple(streams.ran), max((each.stop_s for each in streams.ran), default=0.0)
        return self._known[key]

    def _act(self, streams: Streams, action: Action) -> None:
        layers, is_split = self._layers(action.stage), self.is_split[action.stage]
        if action.kind == "F":
            gathers_now = action in self.first and not self.work.gathers_first
            _forward(streams, layers, gathers_now, is_single=self.work.is_single)
        elif action.kind == "W" or (action.kind == "I" and is_split):
            _backward_part(streams, layers[::-1] if is_split else (), action.kind)
        else:
            reduces_rest = action in self.last and self.work.reduces_in_last
            _backward(streams, layers[::-1], reduces_rest=reduces_rest)

    def _keep(self, group: int, ran: tuple[Ran, ...]) -> None:
        """Note what a group did from now on, outside of all actions."""
        if ran:
            self.instances.append(_Instance(group, self.now_s[group], ran, None))
            self.now_s[group] += max(each.stop_s for each in ran)

    def _tell(self) -> None:
        """Broadcasts, for which all groups must be there."""
        start_s = max(self.now_s)
        for item in self.work.told:
            for group in range(len(self.now_s)):
                self.between.append((group, Ran(item, start_s, start_s + item.seconds)))
            start_s += item.seconds
        self.now_s = [start_s] * len(self.now_s)

    def _finish(self, group: int) -> None:
        """What a group has left to do on its own."""
        streams = Streams()
        for item in self.work.at_end[group]:
            streams.run(item)
        for stage, own in enumerate(self.work.groups):
            if own == group and not self.work.reduces_in_last:
                for layer in self._layers(stage):
                    for item in () if layer.reduces_each else layer.reduces:
                        streams.run(item)
        self._keep(group, tuple(streams.ran))

    def _exchange(self, groups: Sequence[int], items: Sequence[Item]) -> None:
        now_s = max(self.now_s[group] for group in groups)
        for item in items:
            for group in groups:
                self.between.append((group, Ran(item, now_s, now_s + item.seconds)))
            now_s += item.seconds
        for group in groups:
            self.now_s[group] = now_s

    def _optimize(self, group: int) -> None:
        streams = Streams()
        for layers, own in zip(self.work.ranges, self.work.groups, strict=True):
            if own == group:
                for item in self.work.optimizer[layers.start : layers.stop]:
                    if item.seconds:
                        streams.run(item)
        self._keep(group, tuple(streams.ran))

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


def _can_split(layer: LayerWork) -> bool:
    return not layer.regathers and not layer.is_rerun


def _forward(streams: Streams, layers: Sequence[LayerWork], is_first: bool, *, is_single: bool) -> None:
    """`is_single`: there is no other forward in this step."""
    tickets: list[int] = []
    for index, layer in enumerate(layers):
        for ahead in layers[len(tickets) : index + 2]:  # this layer and the next one
            gathers = ahead.gathers if ahead.gathers_each or is_first else ()
            tickets.append(streams.start(gathers))
            if not (is_single or ahead.reduces_each):
                streams.wait(tickets[-1])
        streams.wait(tickets[index])
        for item in layer.forward:
            streams.run(item)


def _backward(streams: Streams, layers: Sequence[LayerWork], *, reduces_rest: bool) -> None:
    """`layers` from the last to the first; `reduces_rest`: those are reduced as well that aren't each time."""
    tickets: list[int] = []
    reducing = 0
    for index, layer in enumerate(layers):
        for ahead in layers[len(tickets) : index + 2]:
            tickets.append(streams.start(ahead.gathers if ahead.regathers else ()))
        streams.wait(tickets[index])
        for item in (*layer.again, *layer.backward):
            streams.run(item)
        before, reducing = reducing, streams.start(layer.reduces if layer.reduces_each or reduces_rest else ())
        streams.wait(before)
    streams.wait(reducing)


def _backward_part(streams: Streams, layers: Sequence[LayerWork], kind: str) -> None:
    """I, or W with the reductions behind it."""
    for layer in layers:
        for item in (*layer.again, *layer.inputs) if kind == "I" else layer.weights:
            streams.run(item)
    for layer in layers if kind == "W" else ():
        for item in layer.reduces if layer.reduces_each else ():
            streams.run(item)


def _seconds(items: Sequence[Item]) -> float:
    return sum(item.seconds for item in items)


def _event(group: int, ran: Ran, microbatch: int, since_s: float = 0.0) -> Event:
    item = ran.item
    start_s, stop_s = since_s + ran.start_s, since_s + ran.stop_s
    stream = "compute"
    if item.is_collective:
        stream = "pipeline" if item.category in ("send", "broadcast") else "communication"
    return Event(
        group, stream, item.name, item.category, start_s, stop_s, item.layer, microbatch, item.num_bytes, item.detail
    )


def _joined(instance: _Instance, action: Action) -> Iterator[Event]:
    """One event for computing, one for all collectives."""
    group, start_s, ran, _ = instance
    name = f"stage {action.stage}"
    stop_s = start_s + max(each.stop_s for each in ran)
    yield Event(group, "compute", name, _CATEGORIES[action.kind], start_s, stop_s, -1, action.microbatch)
    collectives = [each for each in ran if each.item.is_collective]
    if collectives:
        longest = max(collectives, key=lambda each: each.item.seconds)
        first_s = start_s + min(each.start_s for each in collectives)
        last_s = start_s + max(each.stop_s for each in collectives)
        yield Event(
            group, "communication", name, longest.item.category, first_s, last_s, -1, action.microbatch,
            sum(each.item.num_bytes for each in collectives), f"{len(collectives)} collectives",
        )  # fmt: skip
