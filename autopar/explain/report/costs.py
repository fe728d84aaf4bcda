"""Where time and bytes go: by what they are spent on, by layer kind, by link, and how near a device is to its roofs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.explain.explanation import Explanation, KindRow, LinkRow
from autopar.explain.kind_work import KindWork, roofs
from autopar.explain.planner import Answer
from autopar.explain.tables import kind_name
from autopar.pages.shapes import (
    COLORS,
    LEGEND,
    MARGIN,
    MEMORY_COLORS,
    SERIES,
    Cell,
    Figure,
    Number,
    Table,
    axis,
    digits,
    percent,
    size,
)
from autopar.user_text.quantities import size_unit

__all__ = [
    "bytes_figure",
    "link_figure",
    "roofline_figure",
    "roofline_table",
    "seconds_figure",
]

_SHORT = {"activation communication": "act. comm.", "parameter communication": "par. comm."}
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "hexagon", "x")


def seconds_figure(explanation: Explanation) -> Figure:
    """Seconds by layer kind, stacked by what they are spent on."""
    data = _stacks(explanation.kinds, [kind.seconds for kind in explanation.kinds], COLORS, 1e3, "ms")
    layout = _bars("ms of a step, all layers of the kind together")
    return Figure(
        "kind-seconds", "Seconds by layer kind; the table has the same numbers.", data, layout, _height(explanation)
    )


def bytes_figure(explanation: Explanation) -> Figure:
    """Bytes by layer kind, stacked by what they hold."""
    factor, unit = size_unit(max(sum(each for _, each in kind.num_bytes) for kind in explanation.kinds))
    data = _stacks(explanation.kinds, [kind.num_bytes for kind in explanation.kinds], MEMORY_COLORS, 1 / factor, unit)
    layout = _bars(f"{unit} per device, all layers of the kind together")
    return Figure(
        "kind-bytes", "Bytes by layer kind; the table has the same numbers.", data, layout, _height(explanation)
    )


def _height(explanation: Explanation) -> int:
    return 150 + 30 * len(explanation.kinds)


def _bars(title: str) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "xaxis": axis(title),
        "yaxis": axis(autorange="reversed", fixedrange=True),
        "legend": LEGEND,
        "margin": MARGIN,
    }


def _stacks(
    kinds: Sequence[KindRow],
    values: Sequence[tuple[tuple[str, float], ...]],
    colors: dict[str, str],
    factor: float,
    unit: str,
) -> tuple[dict[str, Any], ...]:
    names = [kind_name(kind.layers) for kind in kinds]
    results: list[dict[str, Any]] = []
    for what in dict.fromkeys(name for row in values for name, _ in row):
        sizes = [factor * dict(row).get(what, 0.0) for row in values]
        if any(sizes):
            results.append(
                {
                    "type": "bar", "orientation": "h", "name": _SHORT.get(what, what), "y": names, "x": sizes,
                    "marker": {"color": colors[what]},
                    "hovertemplate": f"%{{y}}<br>{what}: %{{x:,.4~r}} {unit}<extra></extra>",
                }
            )  # fmt: skip
    return tuple(results)


def link_figure(explanation: Explanation) -> Figure:
    """Seconds by link and kind of collective."""
    links = list(dict.fromkeys(row.link for row in explanation.links))
    kinds = list(dict.fromkeys(row.kind for row in explanation.links))
    data: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds):
        rows = {row.link: row for row in explanation.links if row.kind == kind}
        data.append(
            {
                "type": "bar", "orientation": "h", "name": kind, "y": links,
                "x": [rows[link].seconds * 1e3 if link in rows else 0.0 for link in links],
                "customdata": [_volume(rows.get(link)) for link in links],
                "marker": {"color": SERIES[number % len(SERIES)]},
                "hovertemplate": f"{kind}: %{{x:,.4~r}} ms, %{{customdata}}<extra></extra>",
            }
        )  # fmt: skip
    text = (
        "Milliseconds of collectives by link, each priced alone: in the step, those of a layer's parameters share "
        "buffers and overlap with compute. The table has the same numbers."
    )
    return Figure("links", text, tuple(data), _bars("ms of a step"), 170 + 36 * len(links))


def _volume(row: LinkRow | None) -> str:
    return f"{row.runs} runs, {size(row.num_bytes).text}" if row else ""


def roofline_figure(answer: Answer, works: Sequence[KindWork]) -> Figure:
    """Each layer kind by flops per byte and the rate that it reaches, under the device's roofs."""
    shown = [work for work in works if work.flops and work.seconds]
    data: list[dict[str, Any]] = []
    low = min((work.intensity for work in shown), default=1.0) / 4
    high = max((work.intensity for work in shown), default=1.0) * 4
    for dtype in dict.fromkeys(work.dtype for work in shown):
        flops, num_bytes = roofs(answer, dtype)
        if flops:
            ridge = flops / num_bytes
            places = sorted({low, ridge, max(high, 2 * ridge)})
            data.append(
                {
                    "type": "scatter", "mode": "lines", "name": f"roof, {dtype}", "line": {"width": 2, "dash": "dash"},
                    "x": places, "y": [min(flops, place * num_bytes) / 1e12 for place in places],
                    "hovertemplate": "%{x:,.4~r} flops per byte: at most %{y:,.4~r} TFLOP/s<extra></extra>",
                }
            )  # fmt: skip
    longest = max((work.seconds for work in shown), default=1.0)
    for number, work in enumerate(shown):
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": kind_name(work.layers), "x": [work.intensity],
                "y": [work.flops_per_s / 1e12],
                "marker": {
                    "size": 10 + 18 * math.sqrt(work.seconds / longest), "color": SERIES[number % len(SERIES)],
                    "symbol": _SYMBOLS[number % len(_SYMBOLS)], "line": {"width": 1},
                },
                "hovertemplate": "%{x:,.4~r} flops per byte, %{y:,.4~r} TFLOP/s<extra></extra>",
            }
        )  # fmt: skip
    rates = [rate for trace in data for rate in trace["y"]]
    top, bottom = max(rates, default=1.0), min(rates, default=1.0)
    layout = {
        "xaxis": axis("flops per byte", type="log"),
        "yaxis": axis("TFLOP/s", type="log", range=[math.log10(bottom / 2), math.log10(top * 1.5)]),
        "legend": LEGEND,
        "margin": MARGIN,
    }
    return Figure("roofline", "Roofline: arithmetic intensity and rate of each layer kind.", tuple(data), layout, 340)


def roofline_table(answer: Answer, works: Sequence[KindWork]) -> Table:
    """The same in numbers, with the share of the peak."""
    columns = ("layers", "TFLOP", "GB", "flops per byte", "TFLOP/s", "of the peak", "bound by")
    rows: list[tuple[Cell, ...]] = []
    for work in works:
        flops, num_bytes = roofs(answer, work.dtype)
        bound = "bytes" if not flops or work.intensity < flops / num_bytes else "arithmetic"
        rows.append(
            (
                kind_name(work.layers), Number(work.flops, digits(work.flops / 1e12)),
                Number(work.num_bytes, digits(work.num_bytes / 1e9)), Number(work.intensity, digits(work.intensity)),
                Number(work.flops_per_s, digits(work.flops_per_s / 1e12)),
                percent(work.flops_per_s / flops) if flops else "-", bound,
            )
        )  # fmt: skip
    return Table("Ops of one device in one step, forward and backward", columns, tuple(rows))
