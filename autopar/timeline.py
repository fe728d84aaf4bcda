"""A training step as it passes: what the streams of every device group do when, and what a device's memory holds.

Devices of one group do the same at the same time, so a group stands for each of them.  A step may be predicted
(`autopar.search.simulation`) or measured; both open in Perfetto (https://ui.perfetto.dev) by `StepTimeline.to_chrome`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["CATEGORIES", "MEMORY_KINDS", "STREAMS", "Event", "MemoryPoint", "StepTimeline"]

STREAMS = ("compute", "communication", "pipeline", "host")
"""Ops and the optimizer; collectives inside a device group; what the group sends to others; copies between a device
and its host's memory.  All but the third do one thing at a time; sends to different groups may overlap."""

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
"""What an event is: compute (``weight``: gradients of parameters, where they run separately), collectives of
activations, gathers of parameters, reductions of their gradients, sends between stages, what all groups are told at
the end; copies to the host's memory and back."""

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
"""What a device's memory holds; ``overhead`` is the communicator's and the allocator's."""


@dataclass(frozen=True)
class Event:
    """One thing that one stream of one device group does.

    Args:
        group: the device group.
        stream: one of `STREAMS`.
        name: of the layer, or of the value that is moved.
        category: one of `CATEGORIES`.
        start_s: seconds since the step began.
        stop_s: when it ends.
        layer: index of the layer; -1: none.
        microbatch: -1: none.
        num_bytes: of a collective's buffer, as in the NCCL tests; 0 of compute.
        detail: for people, such as "all_gather over 8 neighbours".
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

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.stop_s - self.start_s


@dataclass(frozen=True)
class MemoryPoint:
    """What a device holds from `time_s` on: bytes in the order of `MEMORY_KINDS`."""

    time_s: float
    num_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        """All kinds together."""
        return sum(self.num_bytes)


@dataclass(frozen=True)
class StepTimeline:
    """One training step.

    Args:
        step_s: seconds of the whole step.
        events: of all groups.
        memory: per device group, its memory whenever it changes; ``()`` where it is not known.
        memory_limit_bytes: what a device may hold; 0: not known.
    """

    step_s: float
    events: tuple[Event, ...]
    memory: tuple[tuple[MemoryPoint, ...], ...] = ()
    memory_limit_bytes: float = 0.0

    def on(self, group: int, stream: str) -> tuple[Event, ...]:
        """The events of one stream in order of time."""
        result = (event for event in self.events if event.group == group and event.stream == stream)
        return tuple(sorted(result, key=lambda event: (event.start_s, event.stop_s)))

    def busy_s(self, group: int, stream: str) -> float:
        """Seconds in which the stream does something."""
        return sum(event.seconds for event in self.on(group, stream))

    def exposed_s(self, group: int) -> float:
        """Seconds in which the group doesn't compute: exposed communication, and waiting."""
        return self.step_s - self.busy_s(group, "compute")

    def peak(self, group: int) -> MemoryPoint:
        """The moment at which a device of the group holds most."""
        return max(self.memory[group], key=lambda point: point.total_bytes)

    def to_chrome(self) -> str:
        """The step in Chrome's trace event format: a process per group, a thread per stream, counters of memory.

        Events of one thread never overlap: a stream that does several things at once has further threads.  Times are
        whole nanoseconds, so that nothing overlaps by rounding either.

        Source: "Trace Event Format", the document that Perfetto's legacy JSON importer refers to.
        """
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_chrome_events(self))})


def _chrome_events(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    groups = sorted({event.group for event in timeline.events} | set(range(len(timeline.memory))))
    busy: dict[tuple[int, int], list[int]] = {}  # per group and stream: when each of its threads is free
    for group in groups:
        yield _metadata("process_name", group, 0, f"device group {group}")
        for number, stream in enumerate(STREAMS):
            yield _metadata("thread_name", group, number, stream)
            busy[group, number] = [0]
    for event in sorted(timeline.events, key=lambda event: (event.start_s, event.stop_s)):
        stream = STREAMS.index(event.stream)
        start_ns, stop_ns = round(event.start_s * 1e9), round(event.stop_s * 1e9)
        free = busy[event.group, stream]
        lane = next((lane for lane, until_ns in enumerate(free) if until_ns <= start_ns), len(free))
        thread = stream + lane * len(STREAMS)
        if lane == len(free):
            free.append(0)
            yield _metadata("thread_name", event.group, thread, f"{event.stream} {lane + 1}")
        free[lane] = stop_ns
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
    for group, points in enumerate(timeline.memory):
        yield from _counters(group, points)


def _metadata(name: str, group: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": group, "tid": thread, "name": name, "args": {"name": text}}


def _counters(group: int, points: Iterable[MemoryPoint]) -> Iterator[dict[str, Any]]:
    for point in points:
        values = dict(zip(MEMORY_KINDS, point.num_bytes, strict=True))
        yield {"ph": "C", "pid": group, "name": "memory (bytes)", "ts": point.time_s * 1e6, "args": values}
