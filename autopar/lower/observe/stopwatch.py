"""Measures a step as it runs: when each layer computes forward and backward, when each collective is under way.

Layers run one after the other, so a layer's time lasts until something else begins.  On an accelerator the marks are
events on the stream, read when the step is over; nothing waits for them (but see
`autopar.host.accelerators.DeviceClock`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.host.accelerators import DeviceClock
from autopar.lower.communication.collectives import Collective, Handle
from autopar.timeline import STREAM_OF, Event, StepTimeline

__all__ = ["StepClock", "Stopwatch"]

Seconds = Callable[[], float]
"""A moment, in seconds since the stopwatch began; call it when the step is over."""


@dataclass(frozen=True)
class _Mark:
    """From `start` on this rank does something; ``category == ""``: nothing that is measured.

    `order` is when the host said so, among all marks and collectives of a step.
    """

    category: str
    layer: int
    microbatch: int
    start: Seconds
    order: int


@dataclass(frozen=True)
class _TimedCollective:
    collective: Collective
    category: str
    layer: str
    start: Seconds
    stop: Seconds
    order: int


class StepClock:
    """The moments of one step of one rank, and its collectives, whichever plan runs the step.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        """It begins now."""
        self._count = 0
        self.collectives: list[_TimedCollective] = []
        self._clock = DeviceClock(device)

    def watch(self, collective: Collective, purpose: tuple[str, str]) -> Callable[[Handle], Handle]:
        """Measure a collective from now on, until it has arrived as far as the backend tells, else is waited for."""
        category, name = purpose
        start, stops = self.now(), list[Seconds]()

        def stop() -> float:
            return stops[0]() if stops else start()

        self.collectives.append(_TimedCollective(collective, category, name, start, stop, self.next()))

        def watched(handle: Handle) -> Handle:
            handle.on_arrival(lambda: stops.append(self.now()))
            return handle

        return watched

    def next(self) -> int:
        """The number of what happens now, in the order of the host."""
        self._count += 1
        return self._count

    def now(self) -> Seconds:
        """This moment."""
        return self._clock.now()

    def elapsed_s(self) -> float:
        """Seconds until everything that was begun has ended."""
        return self._clock.finished_s()


class Stopwatch:
    """Of the layers of one plan on one rank, in one step.

    Args:
        clock: of the step.
        group: the device group of this rank.
        layers: names of all layers.
    """

    def __init__(self, clock: StepClock, group: int, layers: Sequence[str]) -> None:
        """No layer has run."""
        self._clock = clock
        self._group = group
        self._layers = list(layers)
        self._marks: list[_Mark] = []

    def joined(self, others: Sequence[Stopwatch]) -> Stopwatch | None:
        """One of all layers that this one and `others` have measured in the step; None if their layers have other
        names.
        """
        if any(other._layers != self._layers for other in others):
            return None
        made = Stopwatch(self._clock, self._group, self._layers)
        made._marks = sorted((mark for each in (self, *others) for mark in each._marks), key=lambda mark: mark.order)
        return made

    def forward(self, layer: int, microbatch: int) -> None:
        """Layer `layer` begins to compute forward."""
        self._mark("forward", layer, microbatch)

    def backward(self, layer: int, microbatch: int) -> None:
        """Layer `layer` begins to compute backward."""
        self._mark("backward", layer, microbatch)

    @property
    def forward_layer(self) -> int:
        """The layer that computes forward now; -1: none does."""
        last = self._marks[-1] if self._marks else None
        return last.layer if last is not None and last.category == "forward" else -1

    @property
    def is_empty(self) -> bool:
        """Whether no layer has run."""
        return not self._marks

    def optimizer(self) -> None:
        """The last backward has run."""
        self._mark("optimizer", -1, -1)

    def pause(self) -> None:
        """What follows is no layer's."""
        self._mark("", -1, -1)

    def read(self) -> StepTimeline:
        """What was measured, up to now."""
        step_s = self._clock.elapsed_s()
        return StepTimeline(step_s, (*self._computed(step_s), *self._moved()))

    def _computed(self, step_s: float) -> list[Event]:
        ends = [*(mark.start() for mark in self._marks[1:]), step_s]
        results: list[Event] = []
        for mark, stop_s in zip(self._marks, ends, strict=False):
            if mark.category:
                name = self._layers[mark.layer] if mark.layer >= 0 else "behind the last backward"
                where = mark.layer, mark.microbatch
                results.append(Event(self._group, "compute", name, mark.category, mark.start(), stop_s, *where))
        return results

    def _moved(self) -> list[Event]:
        results: list[Event] = []
        for each in self._clock.collectives:
            ran, layer = each.collective, self._layer_of(each)
            category = each.category or (ran.kind if ran.kind in STREAM_OF else "activation communication")
            name = self._layers[layer] if layer >= 0 else ran.kind
            stream = STREAM_OF.get(category, "communication")
            start_s, detail = each.start(), f"{ran.kind} over {ran.axis.size} devices"
            results.append(
                Event(self._group, stream, name, category, start_s, max(start_s, each.stop()), layer, -1,
                      ran.num_bytes, detail)
            )  # fmt: skip
        return results

    def _layer_of(self, each: _TimedCollective) -> int:
        """The layer that a collective names, else the one that computed when it began; -1: none."""
        if each.layer in self._layers:
            return self._layers.index(each.layer)
        before = bisect([mark.order for mark in self._marks], each.order)
        return self._marks[before - 1].layer if before else -1

    def _mark(self, category: str, layer: int, microbatch: int) -> None:
        self._marks.append(_Mark(category, layer, microbatch, self._clock.now(), self._clock.next()))
