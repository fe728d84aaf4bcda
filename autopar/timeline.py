"""The timeline of a training step: the events on the streams of every device group, and the memory of a device.

Devices of one group do the same at the same time, so a group stands for each of its devices.  A step may be predicted
(`autopar.step.simulation.simulate`) or measured; `StepTimeline.to_chrome` exports both for Perfetto (https://ui.perfetto.dev).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["CATEGORIES", "MEMORY_KINDS", "STREAMS", "STREAM_OF", "Event", "MemoryPoint", "StepTimeline"]

_READERS = ("forward", "backward", "recompute")
_ROUNDING = 1e-9  # of a step: an arrival and the start after it are sums in different orders

STREAMS = ("compute", "communication", "parameters", "pipeline", "host")
"""Ops and the optimizer; collectives of activations inside a device group; those of parameters and their gradients;
sends to other groups; copies between a device and its host's memory.  Events of a stream never overlap, except sends
to different groups."""

STREAM_OF = {
    "gather": "parameters",
    "reduce": "parameters",
    "send": "pipeline",
    "broadcast": "pipeline",
    "offload": "host",
    "fetch": "host",
}
"""Categories of events that are on neither of the first two streams, and where they are."""

CATEGORIES = (
    "forward",
    "backward",
    "weight",
    "recompute",
    "optimizer",
    "activation communication",
    "gather",
    "reduce",
    "send",
    "broadcast",
    "offload",
    "fetch",
)
"""Categories of events: compute (``weight``: gradients of parameters, if they run separately), collectives of
activations, gathers of parameters, reductions of their gradients, sends between stages, broadcasts of results to all
groups at the end, and copies to the host's memory and back."""

MEMORY_KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "saved activations",
    "transients",
    "gathered parameters",
    "pipeline buffers",
    "overhead",
)
"""Kinds of a device's memory; ``overhead`` is that of the communicator and the allocator."""


@dataclass(frozen=True)
class Event:
    """An event on one stream of one device group.

    Args:
        group: the device group.
        stream: one of `STREAMS`.
        name: of the layer, or of the value that is moved.
        category: one of `CATEGORIES`.
        start_s: seconds since the step began.
        stop_s: seconds since the step began at which it ends.
        layer: index of the layer; -1: none.
        microbatch: index of the microbatch; -1: none.
        num_bytes: bytes of a collective's buffer, as in the NCCL tests; 0 for compute.
        detail: a text for people, such as "all_gather over 8 neighbors".
        to_group: the device group that receives a send; -1: none, or unknown.
    """

    group: int
    stream: str
    name: str
    category: str
    start_s: float
    stop_s: float
    layer: int = -1
    microbatch: int = -1
    num_bytes: float = 0.0
    detail: str = ""
    to_group: int = -1

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class MemoryPoint:
    """The memory of a device from `time_s` on: bytes in the order of `MEMORY_KINDS`."""

    time_s: float
    num_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        """The sum over all kinds."""
        return sum(self.num_bytes)


@dataclass(frozen=True)
class StepTimeline:
    """One training step.

    Args:
        step_s: seconds of the whole step.
        events: of all groups.
        memory: for each device group, the memory of a device after each change; ``()`` if unknown.
        memory_limit_bytes: the limit of a device's memory; 0: unknown.
    """

    step_s: float
    events: tuple[Event, ...]
    memory: tuple[tuple[MemoryPoint, ...], ...] = ()
    memory_limit_bytes: float = 0.0

    def on(self, group: int, stream: str) -> tuple[Event, ...]:
        """The events of one stream in order of time."""
        events = (event for event in self.events if event.group == group and event.stream == stream)
        return tuple(sorted(events, key=lambda event: (event.start_s, event.stop_s)))

    def busy_s(self, group: int, stream: str) -> float:
        """The sum of the seconds of the stream's events."""
        return sum(event.seconds for event in self.on(group, stream))

    def exposed_s(self, group: int) -> float:
        """Seconds in which the group doesn't compute: exposed communication, and waiting."""
        return self.step_s - self.busy_s(group, "compute")

    def peak(self, group: int) -> MemoryPoint:
        """The point at which the memory of a device of the group is largest."""
        return max(self.memory[group], key=lambda point: point.total_bytes)

    def arrivals(self) -> Iterator[tuple[Event, Event]]:
        """Each send with the event that waits for it: the next forward or backward of its microbatch on that group.

        Gradients of parameters (``weight``) don't wait for sends; other compute of the microbatch on that group comes
        before the send, or after the event that waits.
        """
        waiting: dict[tuple[int, int], list[Event]] = {}
        for event in sorted(self.events, key=lambda event: event.start_s):
            if event.stream == "compute" and event.category in _READERS:
                waiting.setdefault((event.group, event.microbatch), []).append(event)
        starts = {key: [event.start_s for event in events] for key, events in waiting.items()}
        for event in self.events:
            key = event.to_group, event.microbatch
            place = bisect_left(starts.get(key, ()), event.stop_s - _ROUNDING * self.step_s)
            if event.to_group >= 0 and place < len(starts.get(key, ())):
                yield event, waiting[key][place]

    def to_chrome(self) -> str:
        """The step in Chrome's trace event format: a process per group, a thread per stream, counters of memory.

        Events of one thread never overlap: a stream with overlapping events has several threads.  Times are whole
        nanoseconds, so that rounding doesn't cause overlaps either.  Arrows lead from sends to the events that wait for
        them.

        Source: "Trace Event Format", the document that Perfetto's legacy JSON importer refers to.
        """
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_chrome_events(self))})


def _chrome_events(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    groups = sorted({event.group for event in timeline.events} | set(range(len(timeline.memory))))
    free_ns: dict[tuple[int, int], list[int]] = {}  # (group, stream) -> when each of its threads is free
    threads: dict[Event, int] = {}
    for group in groups:
        yield _metadata("process_name", group, 0, f"device group {group}")
        for number, stream in enumerate(STREAMS):
            yield _metadata("thread_name", group, number, stream)
            free_ns[group, number] = [0]
    for event in sorted(timeline.events, key=lambda event: (event.start_s, event.stop_s)):
        stream = STREAMS.index(event.stream)
        start_ns, stop_ns = round(event.start_s * 1e9), round(event.stop_s * 1e9)
        lanes = free_ns[event.group, stream]
        lane = next((lane for lane, until_ns in enumerate(lanes) if until_ns <= start_ns), len(lanes))
        thread = stream + lane * len(STREAMS)
        if lane == len(lanes):
            lanes.append(0)
            yield _metadata("thread_name", event.group, thread, f"{event.stream} {lane + 1}")
        lanes[lane], threads[event] = stop_ns, thread
        yield {
            "ph": "X",
            "pid": event.group,
            "tid": thread,
            "name": event.name,
            "cat": event.category,
            "ts": start_ns / 1e3,
            "dur": (stop_ns - start_ns) / 1e3,
            "args": {
                "category": event.category,
                "layer": event.layer,
                "microbatch": event.microbatch,
                "bytes": event.num_bytes,
                "detail": event.detail,
            },
        }
    for number, (sent, reader) in enumerate(timeline.arrivals()):
        for phase, event in (("s", sent), ("f", reader)):
            yield {
                "ph": phase, "bp": "e", "id": number, "pid": event.group, "tid": threads[event], "name": sent.name,
                "cat": "send", "ts": round(event.start_s * 1e9) / 1e3,
            }  # fmt: skip
    for group, points in enumerate(timeline.memory):
        yield from _counters(group, points)


def _metadata(name: str, group: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": group, "tid": thread, "name": name, "args": {"name": text}}


def _counters(group: int, points: Iterable[MemoryPoint]) -> Iterator[dict[str, Any]]:
    for point in points:
        values = dict(zip(MEMORY_KINDS, point.num_bytes, strict=True))
        yield {"ph": "C", "pid": group, "name": "memory (bytes)", "ts": point.time_s * 1e6, "args": values}
