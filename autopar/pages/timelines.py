"""The step as it passes: what the streams of device groups do when, and what their memory holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from autopar.pages.shapes import (
    COLOURS,
    LEGEND,
    MARGIN,
    MEMORY_COLOURS,
    Cell,
    Figure,
    Table,
    axis,
    count,
    digits,
    milliseconds,
    percent,
    size,
)
from autopar.quantities import size_unit
from autopar.timeline import CATEGORIES, MEMORY_KINDS, STREAMS, Event, MemoryPoint, StepTimeline

__all__ = ["condense", "memory_figure", "memory_table", "shown_groups", "timeline_figure", "timeline_table"]

_MOST_GROUPS = 8
_MOST_BARS = 4000
_TO = " .. "  # between the names of the first and the last of joined events
_MOST_POINTS = 300  # of memory, for each group


def shown_groups(timeline: StepTimeline) -> tuple[int, ...]:
    """The device groups that charts show: all of them, or so many from the first to the last."""
    groups = sorted({event.group for event in timeline.events} | set(range(len(timeline.memory))))
    if len(groups) <= _MOST_GROUPS:
        return tuple(groups)
    return tuple(groups[number * (len(groups) - 1) // (_MOST_GROUPS - 1)] for number in range(_MOST_GROUPS))


def condense(timeline: StepTimeline, groups: Sequence[int], most: int = _MOST_BARS) -> tuple[Event, ...]:
    """The events of these groups; if there are more than `most`, neighbours of one kind are joined.

    First those of one microbatch and category that (nearly) touch.  If there are still too many, the step is divided
    into equal intervals, as many as `most` allows, and the events of one stream and category that start in the same
    interval become one, as long as they are together.  Fewer than streams times categories is not possible.
    """
    by_stream: dict[tuple[int, str], list[Event]] = {(group, stream): [] for group in groups for stream in STREAMS}
    for event in timeline.events:
        if (event.group, event.stream) in by_stream:
            by_stream[event.group, event.stream].append(event)
    streams = [sorted(events, key=lambda event: (event.start_s, event.stop_s)) for events in by_stream.values()]
    if sum(map(len, streams)) <= most:
        return tuple(event for events in streams for event in events)
    drawn = touching = [_join_touching(events, timeline.step_s / 5000) for events in streams]
    num_intervals = most
    while sum(map(len, drawn)) > most and num_intervals:
        drawn = [_join_in_intervals(events, timeline.step_s / num_intervals) for events in touching]
        num_intervals //= 2
    return tuple(event for events in drawn for event in events)


def _join_touching(events: Iterable[Event], gap_s: float) -> list[Event]:
    runs: list[list[Event]] = []
    stop_s = 0.0
    for event in events:
        last = runs[-1][-1] if runs else None
        is_alike = last is not None and (last.category, last.microbatch) == (event.category, event.microbatch)
        if is_alike and event.start_s - stop_s <= gap_s:
            runs[-1].append(event)
            stop_s = max(stop_s, event.stop_s)
        else:
            runs.append([event])
            stop_s = event.stop_s
    return [_as_one(run, run[0].start_s, max(event.stop_s for event in run)) for run in runs]


def _join_in_intervals(events: Sequence[Event], interval_s: float) -> list[Event]:
    """One event per category and interval in which events start; what lasts longer than an interval stays as it is."""
    joined = [event for event in events if event.seconds > interval_s]
    cells: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        if event.seconds <= interval_s:
            cells.setdefault((int(event.start_s / interval_s), event.category), []).append(event)
    free_s: dict[int, float] = {}  # categories follow each other in their interval: none hides another
    for (interval, _), cell in cells.items():
        start_s = max(cell[0].start_s, free_s.get(interval, 0.0))
        extent_s = max(event.stop_s for event in cell) - cell[0].start_s  # less than the sum where sends overlap
        free_s[interval] = start_s + min(sum(event.seconds for event in cell), extent_s)
        joined.append(_as_one(cell, start_s, free_s[interval]))
    return joined


def _as_one(events: Sequence[Event], start_s: float, stop_s: float) -> Event:
    first, last = events[0], events[-1]
    names = (first.name.split(_TO)[0], last.name.split(_TO)[-1])
    microbatch = first.microbatch if all(event.microbatch == first.microbatch for event in events) else -1
    return replace(
        first, name=_TO.join(dict.fromkeys(names)), start_s=start_s, stop_s=stop_s, microbatch=microbatch,
        num_bytes=sum(event.num_bytes for event in events),
    )  # fmt: skip


def timeline_figure(timeline: StepTimeline) -> Figure:
    """A row per stream of each group; what is empty is waiting."""
    groups = shown_groups(timeline)
    events = condense(timeline, groups)
    used = [stream for stream in STREAMS if any(event.stream == stream for event in events)]
    rows = [(group, stream) for group in reversed(groups) for stream in reversed(used)]
    place = {row: number for number, row in enumerate(rows)}
    data: list[dict[str, Any]] = []
    for category in CATEGORIES:
        own = [event for event in events if event.category == category]
        if not own:
            continue
        data.append(
            {
                "type": "bar", "orientation": "h", "name": category, "width": 0.9,
                "y": [place[event.group, event.stream] for event in own],
                "base": [_ms(event.start_s) for event in own], "x": [_ms(event.seconds) for event in own],
                "marker": {"color": COLOURS[category], "line": {"width": 0}},
                "customdata": [_tell(event) for event in own],
                "hovertemplate": f"{category}: %{{customdata}}<extra></extra>",
            }
        )  # fmt: skip
    several = len(groups) > 1
    names = [f"group {group} {stream}" if several else stream for group, stream in rows]
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "xaxis": axis("ms since the step began", range=[0, _ms(timeline.step_s)], zeroline=False),
        "yaxis": axis(
            fixedrange=True, tickvals=list(range(len(rows))), ticktext=names, showgrid=False,
            range=[-0.6, len(rows) - 0.4],
        ),
        "shapes": [
            {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": y - 0.5, "y1": y - 0.5, "line": {"width": 1}}
            for y in range(len(used), len(rows), len(used))
        ],
        "legend": LEGEND,
        "margin": MARGIN,
    }  # fmt: skip
    text = f"Timeline of one step of {digits(timeline.step_s * 1e3)} ms on device groups {', '.join(map(str, groups))}."
    return Figure("timeline", text, tuple(data), layout, max(240, 130 + 22 * len(rows)), has_zoom=True)


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.7g}")


def _tell(event: Event) -> str:
    parts = [event.name]
    if event.microbatch >= 0:
        parts.append(f"microbatch {event.microbatch}")
    if event.detail:
        parts.append(event.detail)
    if event.num_bytes:
        parts.append(size(event.num_bytes).text)
    return ", ".join(parts) + f"<br>{digits(event.start_s * 1e3)} to {digits(event.stop_s * 1e3)} ms"


def timeline_table(timeline: StepTimeline) -> Table:
    """Every group: how long it computes and communicates, and how much of that is exposed."""
    groups = sorted({event.group for event in timeline.events})
    busy = {(event.group, stream): 0.0 for event in timeline.events for stream in STREAMS}
    for event in timeline.events:
        busy[event.group, event.stream] += event.seconds
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        computing = busy[group, "compute"]
        rows.append(
            (
                count(group), milliseconds(computing), percent(computing / timeline.step_s),
                milliseconds(busy[group, "communication"]), milliseconds(busy[group, "pipeline"]),
                percent(1 - computing / timeline.step_s),
            )
        )  # fmt: skip
    columns = ("group", "computes (ms)", "share", "communicates (ms)", "sends (ms)", "not computing")
    return Table("Every device group in one step", columns, tuple(rows))


def memory_figure(timeline: StepTimeline) -> Figure:
    """What a device of each group holds as the step passes, a group at a time, and the limit."""
    data: list[dict[str, Any]] = []
    choices: list[tuple[str, tuple[int, ...]]] = []
    groups = [group for group in shown_groups(timeline) if group < len(timeline.memory)]
    most = max(timeline.peak(group).total_bytes for group in groups)
    factor, unit = size_unit(most)
    for group in groups:
        points = _thin(timeline.memory[group], timeline.step_s)
        first = len(data)
        for number, kind in enumerate(MEMORY_KINDS):
            if any(point.num_bytes[number] for point in points):
                data.append(
                    {
                        "type": "scatter", "mode": "lines", "name": kind, "stackgroup": str(group),
                        "visible": not first,
                        "x": [_ms(point.time_s) for point in points],
                        "y": [float(f"{point.num_bytes[number] / factor:.5g}") for point in points],
                        "line": {"width": 0.5, "color": MEMORY_COLOURS[kind], "shape": "hv"},
                        "fillcolor": MEMORY_COLOURS[kind],
                        "hovertemplate": f"{kind}: %{{y:,.4~r}} {unit}<extra></extra>",
                    }
                )  # fmt: skip
        choices.append((f"device group {group}", tuple(range(first, len(data)))))
    limit = timeline.memory_limit_bytes / factor
    is_near = limit <= 3 * most / factor  # else it would press the curves flat
    name = f"limit {size(timeline.memory_limit_bytes).text}"
    layout: dict[str, Any] = {
        "xaxis": axis("ms since the step began", range=[0, _ms(timeline.step_s)]),
        "yaxis": axis(f"{unit} per device", range=[0, 1.08 * max(most / factor, limit * is_near)], fixedrange=True),
        "hovermode": "x unified",
        "shapes": [
            {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": limit, "y1": limit,
             "line": {"width": 2, "dash": "dash"}}
        ] if limit and is_near else [],
        "annotations": [
            {"x": 1, "xref": "paper", "y": limit if is_near else 1, "yref": "y" if is_near else "paper",
             "text": name if is_near else f"{name}, far above", "showarrow": False, "xanchor": "right",
             "yanchor": "bottom" if is_near else "top"}
        ] if limit else [],
        "legend": LEGEND,
        "margin": MARGIN,
    }  # fmt: skip
    text = f"Memory of a device over one step, at most {size(most).text}; {name}."
    return Figure(
        "memory", text, tuple(data), layout, 340, has_zoom=True, choices=tuple(choices) if len(choices) > 1 else ()
    )


def _thin(points: Sequence[MemoryPoint], step_s: float) -> list[MemoryPoint]:
    """At most so many of them, among them the fullest of every stretch of time; the last lasts to the step's end."""
    results = list(points)
    if len(results) > _MOST_POINTS:
        size = -(-len(results) // _MOST_POINTS)
        parts = [results[start : start + size] for start in range(0, len(results), size)]
        results = [max(part, key=lambda point: point.total_bytes) for part in parts]
    return [*results, MemoryPoint(step_s, results[-1].num_bytes)] if results else []


def memory_table(timeline: StepTimeline) -> Table:
    """Every group at the moment at which it holds most."""
    rows: list[tuple[Cell, ...]] = []
    for group in range(len(timeline.memory)):
        peak = timeline.peak(group)
        rows.append(
            (
                count(group), size(peak.total_bytes), milliseconds(peak.time_s),
                *(size(each) for each in peak.num_bytes),
            )
        )  # fmt: skip
    columns = ("group", "peak", "at (ms)", *MEMORY_KINDS)
    return Table("What a device holds when it holds most", columns, tuple(rows))
