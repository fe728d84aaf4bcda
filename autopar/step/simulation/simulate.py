"""A step of a plan, event by event: `simulate_step`.

Each device group works through its actions (`simulation.actions`), layer by layer: one stream computes and runs what
it waits for, one moves parameters and gradients, one copies between device and host.  A collective that computing waits
for runs at once, as soon as the collective that is under way has ended, and no other begins before it ends; but those
of parameters between nodes run at the same time as those inside nodes
(`costs.overlap_estimate.runs_concurrently`).  What computing does not wait for runs in the order in which it was
started, and takes as long as it does alone; what computes at the same time goes on at ``1 - taken`` of its speed
(`benchmarks.published.overlap.both_s` is the closed form of one pair).

At the end the loss is broadcast to all groups, which reduce what is left, exchange tied gradients, and run
the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from autopar.plan import Plan
from autopar.program import Program
from autopar.schedules.action_lists import Action, ScheduleSource, StageCost, Timeline, simulate_schedule
from autopar.step.costs.overlap_estimate import runs_concurrently
from autopar.step.costs.plan_collectives import StepCollectives
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.prices import Prices
from autopar.step.simulation.actions import LayerAction
from autopar.step.simulation.step_memory import step_memory, timed_memory
from autopar.step.simulation.step_work import Item, StepWork, step_work
from autopar.step.training import TrainingSpec
from autopar.timeline import STREAM_OF, Event, StepTimeline

__all__ = ["MAX_EVENTS", "Ran", "Streams", "simulate_step", "step_seconds"]


class Ran(NamedTuple):
    """An item, and when it ran."""

    item: Item
    start_s: float
    stop_s: float


class _Queue:
    """Items that one stream does in order; `left_s` is what is left of the first."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.left_s = 0.0
        self.started = 0  # how many have been started, and how many of them have ended
        self.ended = 0

    def add(self, item: Item) -> None:
        if not self.items:
            self.left_s = item.seconds
        self.items.append(item)
        self.started += 1

    def end_first(self) -> Item:
        item = self.items.popleft()
        self.ended += 1
        self.left_s = self.items[0].seconds if self.items else 0.0
        return item


class Streams:
    """Runs items one after the other and notes when; `now_s` is the clock of the computing stream.

    At the same time collectives run in one queue and copies between device and host in another.
    """

    def __init__(self) -> None:
        """At time 0, with nothing under way."""
        self.now_s = 0.0
        self.ran: list[Ran] = []
        self._network, self._host = _Queue(), _Queue()

    def start(self, items: Iterable[Item], *, on_host: bool = False) -> int:
        """Start collectives, or copies to or from the host, that overlap with compute; the ticket to wait for them."""
        queue = self._queue(on_host=on_host)
        for item in items:
            queue.add(item)
        return queue.started

    def wait(self, ticket: int, *, on_host: bool = False) -> None:
        """Compute nothing until everything up to this ticket has ended."""
        queue = self._queue(on_host=on_host)
        while queue.ended < ticket:
            self._end_first(queue)

    def _queue(self, *, on_host: bool) -> _Queue:
        return self._host if on_host else self._network

    def run(self, item: Item) -> None:
        """Compute, or communicate while nothing computes."""
        network = self._network
        if self._holds_up(item) and network.left_s < network.items[0].seconds:  # it is under way
            self._end_first(network)
        start_s, left_s = self.now_s, item.seconds
        while left_s > 0 and (busy := self._concurrent(item)):
            first = busy[-1] if busy[-1].left_s < busy[0].left_s else busy[0]
            taken = 0.0
            for queue in busy:  # copies to the host take none of a collective's speed
                taken += queue.items[0].taken if queue is network or not item.is_collective else 0.0
            speed = max(0.0, 1.0 - taken)
            done_s = speed * first.left_s  # of this item, until the first of what is under way ends
            if done_s > left_s:
                self._pass(busy, left_s / speed)
                left_s = 0.0
            else:
                left_s -= done_s
                self._pass(busy, first.left_s)
                self._note_end(first, self.now_s)
        self.now_s += left_s
        self.ran.append(Ran(item, start_s, self.now_s))

    def _holds_up(self, item: Item) -> bool:
        """Whether the next collective of parameters and this item can't run at the same time."""
        items = self._network.items
        return item.is_collective and bool(items) and not runs_concurrently(items[0].links, item.links)

    def _concurrent(self, item: Item) -> list[_Queue]:
        """The queues that go on while the computing stream runs this item; thousands of times in each simulation."""
        network = [self._network] if self._network.items and not self._holds_up(item) else []
        return [*network, self._host] if self._host.items else network

    def _busy(self) -> list[_Queue]:
        return [queue for queue in (self._network, self._host) if queue.items]

    def _end_first(self, queue: _Queue) -> None:
        """Let time pass until the first of `queue` ends."""
        done = False
        while not done:
            busy = self._busy()
            first = min(busy, key=lambda each: (each.left_s, each is queue))
            self._pass(busy, first.left_s)
            self._note_end(first, self.now_s)
            done = first is queue

    def _pass(self, queues: Sequence[_Queue], seconds: float) -> None:
        """Let these queues work for so many seconds."""
        self.now_s += seconds
        for queue in queues:
            queue.left_s -= seconds

    def _note_end(self, queue: _Queue, stop_s: float) -> None:
        item = queue.end_first()
        self.ran.append(Ran(item, stop_s - item.seconds, stop_s))


MAX_EVENTS = 200_000
"""Above so many events of layers, a timeline shows whole actions: so many are about 40 MB of trace."""

_STARTS = ("UNSHARD", "REDUCE", "OFFLOAD", "FETCH")
_CATEGORIES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


def step_seconds(
    layers: PlannedLayers,
    prices: Prices,
    training: TrainingSpec,
    schedules: ScheduleSource | None,
    between: StepCollectives | None = None,
) -> float:
    """The seconds of `simulate_step`; `between` as in `step_work`."""
    return _Simulation(step_work(layers, prices, training, schedules, between, is_named=False)).run()


def simulate_step(
    program: Program,
    plan: Plan,
    prices: Prices,
    training: TrainingSpec,
    schedules: ScheduleSource | None,
    *,
    detail: str = "",
    overhead_bytes: float = 0.0,
) -> StepTimeline:
    """One training step by `plan`, as it is expected to pass.

    Args:
        program: that the plan fits.
        plan: any plan.
        prices: of the devices that it runs on.
        training: how it is trained.
        schedules: where the action lists of its schedule come from; needed for a plan with stages.
        detail: ``"layers"``: an event for each piece of a layer and each collective.  ``"actions"``: one for what a
            stage computes for one microbatch, one for all its collectives, one for each transfer.  ``""``: layers, as
            long as these are at most `MAX_EVENTS` events.
        overhead_bytes: what communicators and the allocator take of a device, in addition to what the plan may use.

    Returns:
        The step's seconds, the same for every `detail`; the events and the memory of every device group.
    """
    training = training.by(plan.decisions)
    layers = PlannedLayers(program, plan.decisions)
    simulation = _Simulation(step_work(layers, prices, training, schedules))
    step_s = simulation.run()
    if not detail:
        detail = "layers" if simulation.num_events <= MAX_EVENTS else "actions"
    events = tuple(simulation.events(by_action=detail == "actions"))
    if not events:
        return StepTimeline(step_s, ())
    memory = step_memory(layers, training, schedules, overhead_bytes)
    return StepTimeline(
        step_s, events, timed_memory(memory, events, step_s), plan.memory_limit_bytes + overhead_bytes
    )  # fmt: skip


class _Instance(NamedTuple):
    """Something that ran on a group's streams from `start_s` on."""

    group: int
    start_s: float
    ran: tuple[Ran, ...]
    action: Action | None


class _Simulation:
    def __init__(self, work: StepWork) -> None:
        self.work = work
        self.actions = [action for listed in work.actions.listed for action in listed]
        self.now_s = [0.0] * len(work.actions.listed)
        self.instances: list[_Instance] = []
        self.between: list[tuple[int, Ran]] = []  # on the pipeline stream of a group, at the end of the step
        self.timeline = Timeline(())
        self._known: dict[tuple[object, ...], tuple[tuple[Ran, ...], float]] = {}

    @property
    def num_events(self) -> int:
        """How many events there are of layers."""
        return sum(len(instance.ran) for instance in self.instances)

    def run(self) -> float:
        """The step's seconds."""
        stages = tuple(
            StageCost(0.0, 0.0, 0.0, _seconds(ahead), _seconds(back))
            for ahead, back in zip(self.work.sends, self.work.sends_back, strict=True)
        )
        ran, seconds = zip(*map(self._run, self.actions), strict=True)
        begins_s = [self._begin(group) for group in range(len(self.now_s))]
        self.timeline = simulate_schedule(self.work.actions.listed, stages, seconds, begins_s)
        spans = ((group, span) for group, listed in enumerate(self.timeline.spans) for span in listed)
        for (group, (action, start_s, stop_s)), run in zip(spans, ran, strict=True):
            if action.kind in _CATEGORIES:
                self.now_s[group] = stop_s
            if run:
                self.instances.append(_Instance(group, start_s, run, action))
        if self.work.broadcasts:
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
        self._keep(group, self._perform(self.work.actions.begin(group)))
        return self.now_s[group]

    def _run(self, action: Action) -> tuple[tuple[Ran, ...], float]:
        """What a group does in this action, from second 0 on, and until when."""
        key = self.work.actions.key(action)
        if key not in self._known:
            ran = self._perform(self.work.actions.of(action))
            self._known[key] = ran, max((each.stop_s for each in ran), default=0.0)
        return self._known[key]

    def _perform(self, actions: Iterable[LayerAction], first: Iterable[Item] = ()) -> tuple[Ran, ...]:
        """What the streams of a group do, from second 0 on; `first` comes before the actions."""
        streams = Streams()
        for item in first:
            streams.run(item)
        tickets: dict[LayerAction, int] = {}
        for action in actions:
            work = self.work.layers[action.layer]
            on_host = action.kind.endswith(("OFFLOAD", "FETCH"))
            if action in tickets:
                streams.wait(tickets[action], on_host=on_host)
            elif action.kind in _STARTS:
                ticket = streams.start(work.started(action.kind), on_host=on_host)
                tickets[action._replace(kind=f"WAIT_{action.kind}")] = ticket
            for item in work.items(action.kind):
                streams.run(item)
        return tuple(streams.ran)

    def _keep(self, group: int, ran: tuple[Ran, ...]) -> None:
        """Note what a group did from now on, outside of all actions."""
        if ran:
            self.instances.append(_Instance(group, self.now_s[group], ran, None))
            self.now_s[group] += max(each.stop_s for each in ran)

    def _tell(self) -> None:
        """Broadcasts, for which all groups must be there."""
        start_s = max(self.now_s)
        for item in self.work.broadcasts:
            for group in range(len(self.now_s)):
                self.between.append((group, Ran(item, start_s, start_s + item.seconds)))
            start_s += item.seconds
        self.now_s = [start_s] * len(self.now_s)

    def _finish(self, group: int) -> None:
        """What a group has left to do on its own."""
        self._keep(group, self._perform(self.work.actions.end(group), self.work.at_end[group]))

    def _exchange(self, groups: Sequence[int], items: Sequence[Item]) -> None:
        now_s = max(self.now_s[group] for group in groups)
        for item in items:
            for group in groups:
                self.between.append((group, Ran(item, now_s, now_s + item.seconds)))
            now_s += item.seconds
        for group in groups:
            self.now_s[group] = now_s

    def _optimize(self, group: int) -> None:
        own = (self.work.optimizer[index] for index in self.work.actions.own(group) if self.work.optimizer)
        self._keep(group, self._perform((), (item for item in own if item.seconds)))

    def events(self, *, by_action: bool) -> Iterator[Event]:
        """Everything that ran."""
        for instance in self.instances:
            if by_action and instance.action is not None:
                yield from _joined(instance, instance.action)
            else:
                microbatch = instance.action.microbatch if instance.action else -1
                for ran in instance.ran:
                    # A copy may be one that another action left to this one, of another microbatch.
                    is_copy = STREAM_OF.get(ran.item.category) == "host"
                    yield _event(instance.group, ran, -1 if is_copy else microbatch, instance.start_s)
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
        group, receiver = self.work.actions.groups[sender], self.work.actions.groups[action.stage]
        if by_action and items:
            name = f"stage {sender} to {action.stage}"
            num_bytes = sum(item.num_bytes for item in items)
            yield Event(
                group, "pipeline", name, "send", start_s, stop_s, -1, action.microbatch, num_bytes, items[0].detail,
                receiver,
            )  # fmt: skip
            return
        for item in items:
            ran = Ran(item, start_s, start_s + item.seconds)
            yield _event(group, ran, action.microbatch, to_group=receiver)
            start_s += item.seconds


def _seconds(items: Sequence[Item]) -> float:
    return sum(item.seconds for item in items)


def _event(group: int, ran: Ran, microbatch: int, since_s: float = 0.0, to_group: int = -1) -> Event:
    item = ran.item
    start_s, stop_s = since_s + ran.start_s, since_s + ran.stop_s
    stream = "compute"
    if item.is_collective:
        stream = STREAM_OF.get(item.category, "communication")
    return Event(
        group, stream, item.name, item.category, start_s, stop_s, item.layer, microbatch, item.num_bytes, item.detail,
        to_group,
    )  # fmt: skip


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
        category = longest.item.category
        yield Event(
            group, STREAM_OF.get(category, "communication"), name, category, first_s, last_s, -1, action.microbatch,
            sum(each.item.num_bytes for each in collectives), f"{len(collectives)} collectives",
        )  # fmt: skip
