"""The memory of a step over time: the moments of `autopar.step.memory` at the times of a simulation's events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.step.memory import Moment
from autopar.timeline import Event, MemoryPoint

__all__ = ["timed_memory"]


def timed_memory(
    memory: Sequence[Sequence[Moment]], events: Iterable[Event], step_s: float
) -> tuple[tuple[MemoryPoint, ...], ...]:
    """Per device group, its moments at the times of their layers' events; those without an event have the time of the
    moment before.
    """
    spans: dict[tuple[int, str, int, int], tuple[float, float]] = {}
    for event in events:
        if event.stream != "compute" or event.category == "optimizer":
            continue
        part = "forward" if event.category == "forward" else "backward"
        key = event.group, part, event.layer, event.microbatch
        start_s, stop_s = spans.get(key, (event.start_s, event.stop_s))
        spans[key] = min(start_s, event.start_s), max(stop_s, event.stop_s)
    return tuple(tuple(_timed(group, moments, spans, step_s)) for group, moments in enumerate(memory))


def _timed(
    group: int,
    moments: Sequence[Moment],
    spans: Mapping[tuple[int, str, int, int], tuple[float, float]],
    step_s: float,
) -> Iterator[MemoryPoint]:
    now_s = 0.0
    for moment in moments:
        span = spans.get((group, moment.part, moment.layer, moment.microbatch))
        if moment.part == "end":
            now_s = step_s if moment.is_after else now_s
        elif span is not None:
            now_s = max(now_s, span[1] if moment.is_after else span[0])
        yield MemoryPoint(now_s, moment.num_bytes)
