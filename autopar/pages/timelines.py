"""Figures and tables of a step over time: what the streams of device groups run, and what their memory holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.pages.shapes import (
    COLORS,
    LEGEND,
    MARGIN,
    MEMORY_COLORS,
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
from autopar.timeline import CATEGORIES, MEMORY_KINDS, STREAMS, Event, MemoryPoint, StepTimeline
from autopar.user_text.quantities import size_unit

__all__ = [
    "MAX_BARS", "condense", "memory_figure", "memory_table", "shown_groups", "timeline_figure", "timeline_table",
]  # fmt: skip

# Limits of what a chart shows: browsers stay responsive with so many bars and points, and rows stay readable.
_MAX_GROUPS = 8
MAX_BARS = 4000
"""Events in a chart: if there are more, neighbors are merged."""
_MAX_POINTS = 300  # of memory, for each group
_TO = " .. "  # between the names of the first and the last of joined events
_FEW_ARROWS, _MAX_ARROWS = 150, 3000  # more hide the bars; still more make the page large


def shown_groups(timeline: StepTimeline) -> tuple[int, ...]:
    """The device groups that charts show: all of them, or `_MAX_GROUPS` evenly spaced ones."""
    groups = sorted({event.group for event in timeline.events} | set(range(len(timeline.memory))))
    if len(groups) <= _MAX_GROUPS:
        return tuple(groups)
    return tuple(groups[number * (len(groups) - 1) // (_MAX_GROUPS - 1)] for number in range(_MAX_GROUPS))


def condense(timeline: StepTimeline, groups: Sequence[int], max_bars: int = MAX_BARS) -> tuple[Event, ...]:
    """The events of these groups; if there are more than `max_bars`, neighbors of one category are joined.

    First, events of one microbatch and category that (nearly) touch are joined.  If there are still too many, the step
    is divided into equal intervals, as many as `max_bars` allows, and the events of one stream and category that start
    in the same interval become one event of their total length.  At least one event for each stream and category
    remains.
    """
    by_stream: dict[tuple[int, str], list[Event]] = {(group, stream): [] for group in groups for stream in STREAMS}
    for event in timeline.events:
        if (event.group, event.stream) in by_stream:
            by_stream[event.group, event.stream].append(event)
    streams = [sorted(events, key=lambda event: (event.start_s, event.stop_s)) for events in by_stream.values()]
    if sum(map(len, streams)) <= max_bars:
        return tuple(event for events in streams for event in events)
    bars = [_join_touching(events, timeline.step_s / 5000) for events in streams]
    if sum(map(len, bars)) > max_bars:
        interval_s = timeline.step_s / max_bars
        # To count is much faster than to join.
        while sum(_num_in_intervals(events, interval_s) for events in bars) > max_bars and interval_s < timeline.step_s:
            interval_s *= 2
        bars = [_join_in_intervals(events, interval_s) for events in bars]
    return tuple(event for events in bars for event in events)


def _join_touching(events: Iterable[Event], gap_s: float) -> list[Event]:
    runs: list[list[Event]] = []
    stop_s = 0.0
    for event in events:
        last = runs[-1][-1] if runs else None
        is_same_kind = last is not None and (last.category, last.microbatch) == (event.category, event.microbatch)
        if is_same_kind and event.start_s - stop_s <= gap_s:
            runs[-1].append(event)
            stop_s = max(stop_s, event.stop_s)
        else:
            runs.append([event])
            stop_s = event.stop_s
    return [_join(run, run[0].start_s, max(event.stop_s for event in run)) for run in runs]


def _num_in_intervals(events: Sequence[Event], interval_s: float) -> int:
    """How many events `_join_in_intervals` leaves."""
    short = [event for event in events if event.seconds <= interval_s]
    cells = {(int(event.start_s / interval_s), event.category) for event in short}
    return len(events) - len(short) + len(cells)


def _join_in_intervals(events: Sequence[Event], interval_s: float) -> list[Event]:
    """One event per category and interval in which events start; events longer than an interval aren't joined."""
    bars = [event for event in events if event.seconds > interval_s]
    cells: dict[tuple[int, str], list[Event]] = {}
    for event in events:
        if event.seconds <= interval_s:
            cells.setdefault((int(event.start_s / interval_s), event.category), []).append(event)
    free_s: dict[int, float] = {}  # in an interval, categories follow each other, so that none hides another
    for (interval, _), cell in cells.items():
        start_s = max(cell[0].start_s, free_s.get(interval, 0.0))
        extent_s = max(event.stop_s for event in cell) - cell[0].start_s  # less than the sum if sends overlap
        free_s[interval] = start_s + min(sum(event.seconds for event in cell), extent_s)
        bars.append(_join(cell, start_s, free_s[interval]))
    return bars


def _join(events: Sequence[Event], start_s: float, stop_s: float) -> Event:
    first, last = events[0], events[-1]
    names = (first.name.split(_TO)[0], last.name.split(_TO)[-1])
    microbatch = first.microbatch if all(event.microbatch == first.microbatch for event in events) else -1
    return replace(
        first, name=_TO.join(dict.fromkeys(names)), start_s=start_s, stop_s=stop_s, microbatch=microbatch,
        num_bytes=sum(event.num_bytes for event in events),
    )  # fmt: skip


def timeline_figure(timeline: StepTimeline, other: StepTimeline | None = None, names: Sequence[str] = ()) -> Figure:
    """The chart of events with one row for each stream of each group; gaps are waiting.  Arrows lead from sends to the
    events that wait for them.

    Args:
        timeline: the step.
        other: a step to compare it with; its rows are below those of the first, on the same scale.
        names: of the two steps.
    """
    timelines = [timeline] if other is None else [timeline, other]
    groups = shown_groups(timeline)
    drawn = [condense(each, groups, MAX_BARS // len(timelines)) for each in timelines]
    used = [s for s in STREAMS if any(event.stream == s for events in drawn for event in events)]
    rows = [
        (group, stream, number)
        for group in reversed(groups) for stream in reversed(used) for number in reversed(range(len(timelines)))
    ]  # fmt: skip
    positions = {row: number for number, row in enumerate(rows)}
    data: list[dict[str, Any]] = []
    for category in CATEGORIES:
        bars = [
            (event, number) for number, events in enumerate(drawn) for event in events if event.category == category
        ]
        if not bars:
            continue
        data.append(
            {
                "type": "bar", "orientation": "h", "name": category, "width": 0.9,
                "y": [positions[event.group, event.stream, number] for event, number in bars],
                "base": [_ms(event.start_s) for event, _ in bars], "x": [_ms(event.seconds) for event, _ in bars],
                "marker": {"color": COLORS[category], "line": {"width": 0}},
                "customdata": [_describe(event) for event, _ in bars],
                "hovertemplate": f"{category}: %{{customdata}}<extra></extra>",
            }
        )  # fmt: skip
    has_all = len(groups) == len({event.group for event in timeline.events})
    data += _arrows(timeline, {(g, stream): positions[g, stream, 0] for g, stream, _ in rows}, has_all=has_all)
    step_s = max(each.step_s for each in timelines)
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "xaxis": axis("ms since the step began", range=[0, _ms(step_s)], zeroline=False),
        "yaxis": axis(
            fixedrange=True, tickvals=list(range(len(rows))), showgrid=False, range=[-0.6, len(rows) - 0.4],
            ticktext=[_row_name(row, names, with_group=len(groups) > 1) for row in rows],
        ),
        "shapes": [
            {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": y - 0.5, "y1": y - 0.5, "line": {"width": 1}}
            for y in range(len(used) * len(timelines), len(rows), len(used) * len(timelines))
        ],
        "legend": LEGEND,
        "margin": MARGIN,
    }  # fmt: skip
    text = f"Timeline of one step of {digits(timeline.step_s * 1e3)} ms on device groups {', '.join(map(str, groups))}."
    return Figure("timeline", text, tuple(data), layout, max(240, 130 + 22 * len(rows)), has_zoom=True)


def _row_name(row: tuple[int, str, int], names: Sequence[str], *, with_group: bool) -> str:
    group, stream, number = row
    return " ".join([*([f"group {group}"] if with_group else []), stream, *names[number : number + 1]])


def _arrows(timeline: StepTimeline, positions: Mapping[tuple[int, str], int], *, has_all: bool) -> list[dict[str, Any]]:
    """From the end of each send between drawn groups to the start of the event that waits for it.

    If there are many, or if the chart does not have all groups, the user turns them on in the legend.
    """
    ends = [
        (positions[send.group, send.stream], send.stop_s, positions[reader.group, reader.stream], reader.start_s)
        for send, reader in timeline.arrivals()
        if (send.group, send.stream) in positions and (reader.group, reader.stream) in positions
    ]  # fmt: skip
    if not ends or len(ends) > _MAX_ARROWS:
        return []
    return [
        {
            "type": "scatter", "mode": "lines+markers", "name": "arrival of sends", "hoverinfo": "skip",
            "x": [x for _, sent_s, _, read_s in ends for x in (_ms(sent_s), _ms(read_s), None)],
            "y": [y for sender, _, reader, _ in ends for y in (sender, reader, None)],
            "line": {"width": 1, "color": COLORS["send"]},
            "marker": {
                "symbol": "arrow", "angleref": "previous", "size": [0, 9, 0] * len(ends), "color": COLORS["send"],
            },
            "visible": True if has_all and len(ends) <= _FEW_ARROWS else "legendonly",
        }
    ]  # fmt: skip


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.7g}")


def _describe(event: Event) -> str:
    parts = [event.name]
    if event.microbatch >= 0:
        parts.append(f"microbatch {event.microbatch}")
    if event.detail:
        parts.append(event.detail)
    if event.num_bytes:
        parts.append(size(event.num_bytes).text)
    return ", ".join(parts) + f"<br>{digits(event.start_s * 1e3)} to {digits(event.stop_s * 1e3)} ms"


def timeline_table(timeline: StepTimeline) -> Table:
    """The seconds for which each stream of each group is busy, and the share of time without compute."""
    groups = sorted({event.group for event in timeline.events})
    busy_s = {(event.group, stream): 0.0 for event in timeline.events for stream in STREAMS}
    for event in timeline.events:
        busy_s[event.group, event.stream] += event.seconds
    rows: list[tuple[Cell, ...]] = []
    for group in groups:
        compute_s = busy_s[group, "compute"]
        rows.append(
            (
                count(group), milliseconds(compute_s), percent(compute_s / timeline.step_s),
                *(milliseconds(busy_s[group, stream]) for stream in ("communication", "parameters", "pipeline")),
                percent(1 - compute_s / timeline.step_s),
            )
        )  # fmt: skip
    columns = (
        "group", "compute busy (ms)", "share", "communication (ms)", "of parameters (ms)", "sends (ms)", "compute idle",
    )  # fmt: skip
    return Table("How long the streams of each device group are busy in one step", columns, tuple(rows))


def memory_figure(timeline: StepTimeline) -> Figure:
    """The chart of the memory of a device over time, with a choice of groups, and the limit."""
    data: list[dict[str, Any]] = []
    choices: list[tuple[str, tuple[int, ...]]] = []
    groups = [group for group in shown_groups(timeline) if group < len(timeline.memory)]
    peak_bytes = max(timeline.peak(group).total_bytes for group in groups)
    factor, unit = size_unit(peak_bytes)
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
                        "line": {"width": 0.5, "color": MEMORY_COLORS[kind], "shape": "hv"},
                        "fillcolor": MEMORY_COLORS[kind],
                        "hovertemplate": f"{kind}: %{{y:,.4~r}} {unit}<extra></extra>",
                    }
                )  # fmt: skip
        choices.append((f"device group {group}", tuple(range(first, len(data)))))
    limit = timeline.memory_limit_bytes / factor
    is_near = limit <= 3 * peak_bytes / factor  # a higher limit in the chart would flatten the curves
    name = f"the device's {size(timeline.memory_limit_bytes).text}"
    layout: dict[str, Any] = {
        "xaxis": axis("ms since the step began", range=[0, _ms(timeline.step_s)]),
        "yaxis": axis(
            f"{unit} per device", range=[0, 1.08 * max(peak_bytes / factor, limit * is_near)], fixedrange=True
        ),
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
    text = f"Memory of a device over one step, at most {size(peak_bytes).text}; {name}."
    return Figure(
        "memory", text, tuple(data), layout, 340, has_zoom=True, choices=tuple(choices) if len(choices) > 1 else ()
    )


def _thin(points: Sequence[MemoryPoint], step_s: float) -> list[MemoryPoint]:
    """At most `_MAX_POINTS` points, the highest of each interval, and the last one again at the end of the step."""
    kept = list(points)
    if len(kept) > _MAX_POINTS:
        length = -(-len(kept) // _MAX_POINTS)
        intervals = [kept[start : start + length] for start in range(0, len(kept), length)]
        kept = [max(interval, key=lambda point: point.total_bytes) for interval in intervals]
    return [*kept, MemoryPoint(step_s, kept[-1].num_bytes)] if kept else []


def memory_table(timeline: StepTimeline) -> Table:
    """The peak memory of a device of each group, by kind."""
    rows: list[tuple[Cell, ...]] = []
    for group in range(len(timeline.memory)):
        peak = timeline.peak(group)
        rows.append(
            (
                count(group), size(peak.total_bytes), milliseconds(peak.time_s),
                *map(size, peak.num_bytes),
            )
        )  # fmt: skip
    columns = ("group", "total", "at (ms)", *MEMORY_KINDS)
    return Table("Memory of a device at its peak, overhead included", columns, tuple(rows))
