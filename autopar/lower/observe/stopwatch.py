"""Measures a step as it runs: when each layer computes forward and backward, when each collective is under way.

Layers run one after the other, so a layer's time lasts until something else begins.  On a GPU the marks are events on
the stream, read when the step is over; nothing waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autopar.lower.communication.collectives import Collective, Handle
from autopar.timeline import Event, StepTimeline

__all__ = ["Stopwatch"]

_STREAMS = {"send": "pipeline", "broadcast": "pipeline"}

Seconds = Callable[[], float]
"""A moment, in seconds since the stopwatch began; call it when the step is over."""


@dataclass(frozen=True)
class _Mark:
    """From `start` on this rank does something; ``category == ""``: nothing that is measured."""

    category: str
    layer: int
    microbatch: int
    start: Seconds


@dataclass(frozen=True)
class _TimedCollective:
    collective: Collective
    category: str
    layer: int
    start: Seconds
    stop: Seconds


class Stopwatch:
    """Of one step of one rank.

    Args:
        group: the device group of this rank.
        layers: names of all layers.
        device: of this rank.
    """

    def __init__(self, group: int, layers: Sequence[str], device: torch.device) -> None:
        """It begins now."""
        self._group = group
        self._layers = list(layers)
        self._device = device
        self._marks: list[_Mark] = []
        self._collectives: list[_TimedCollective] = []
        self._began_s = time.perf_counter()
        self._first = self._record() if device.type != "cpu" else None

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

    def watch(self, collective: Collective, purpose: tuple[str, str]) -> Callable[[Handle], Handle]:
        """Measure a collective from now on, until it has arrived as far as the backend tells, else is waited for."""
        category, name = purpose
        current = self._marks[-1].layer if self._marks else -1
        layer = self._layers.index(name) if name in self._layers else current
        start, stops = self._now(), list[Seconds]()

        def stop() -> float:
            return stops[0]() if stops else start()

        self._collectives.append(_TimedCollective(collective, category, layer, start, stop))

        def watched(handle: Handle) -> Handle:
            handle.on_arrival(lambda: stops.append(self._now()))
            return handle

        return watched

    def read(self) -> StepTimeline:
        """What was measured, up to now."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        step_s = time.perf_counter() - self._began_s
        return StepTimeline(step_s, (*self._computed(step_s), *self._moved()))

    def _computed(self, step_s: float) -> list[Event]:
        ends = [*(mark.start() for mark in self._marks[1:]), step_s]
        results: list[Event] = []
        for mark, stop_s in zip(self._marks, ends, strict=True):
            if mark.category:
                name = self._layers[mark.layer] if mark.layer >= 0 else "behind the last backward"
                where = mark.layer, mark.microbatch
                results.append(Event(self._group, "compute", name, mark.category, mark.start(), stop_s, *where))
        return results

    def _moved(self) -> list[Event]:
        results: list[Event] = []
        for each in self._collectives:
            ran = each.collective
            category = each.category or (ran.kind if ran.kind in _STREAMS else "activation communication")
            name = self._layers[each.layer] if each.layer >= 0 else ran.kind
            stream = _STREAMS.get(category, "communication")
            start_s, detail = each.start(), f"{ran.kind} over {ran.axis.size} devices"
            results.append(
                Event(self._group, stream, name, category, start_s, max(start_s, each.stop()), each.layer, -1,
                      ran.num_bytes, detail)
            )  # fmt: skip
        return results

    def _mark(self, category: str, layer: int, microbatch: int) -> None:
        self._marks.append(_Mark(category, layer, microbatch, self._now()))

    def _now(self) -> Seconds:
        if self._first is None:
            now_s = time.perf_counter() - self._began_s
            return lambda: now_s
        first, event = self._first, self._record()
        return lambda: first.elapsed_time(event) / 1e3

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
