"""The plans that the search considered: their front of time against memory."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from autopar.explain.planner import Answer
from autopar.explain.runners_up import pareto_front
from autopar.pages.shapes import LEGEND, MARGIN, Figure, Table, axis, milliseconds, size
from autopar.search import ConsideredPlan
from autopar.user_text.quantities import size_unit

__all__ = ["front_figure", "front_table"]

_MOST_BEHIND = 600
_MOST_ROWS = 12  # of a table that is read at a glance
_HIGHEST = 3  # the chart ends at so many times the plan's seconds


def front_figure(answer: Answer) -> Figure:
    """Seconds against bytes of what the search looked at, and the plan."""
    plan = answer.plan
    sums = [each for each in answer.considered if not each.is_simulated]
    simulated = [each for each in answer.considered if each.is_simulated]
    front = pareto_front(sums)
    on_front = set(map(id, front))
    behind = [each for each in sums if id(each) not in on_front]
    step = -(-len(behind) // _MOST_BEHIND) or 1
    widest = max(each.peak_memory_bytes for each in (*front, plan))
    factor, unit = size_unit(widest)
    limit, widest = plan.memory_limit_bytes / factor, widest / factor
    is_near = limit <= 3 * widest  # else it would press the points together
    gray, blue = {"size": 5, "opacity": 0.45, "color": "#8f8f8f"}, {"size": 7, "color": "#0072b2"}
    orange = {"size": 9, "color": "#e69f00", "symbol": "diamond"}
    data = (
        _points("considered", behind[::step], (factor, unit), "markers", gray),
        _points("front: no faster plan with as little memory", front, (factor, unit), "lines+markers", blue),
        _points("simulated", simulated, (factor, unit), "markers", orange),
        {
            "type": "scatter", "mode": "markers", "name": "the plan", "x": [plan.peak_memory_bytes / factor],
            "y": [plan.step_time_s * 1e3],
            "marker": {"size": 16, "symbol": "star", "color": "#d55e00", "line": {"width": 1}},
            "hovertemplate": f"the plan: %{{y:,.4~r}} ms, %{{x:,.4~r}} {unit}<extra></extra>",
        },
    )  # fmt: skip
    layout = {
        "xaxis": axis(f"{unit} per device", range=[0, 1.06 * (max(widest, limit) if is_near else widest)]),
        "yaxis": axis("ms per step", range=[0.0, _HIGHEST * plan.step_time_s * 1e3]),
        "shapes": [
            {"type": "line", "x0": limit, "x1": limit, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"width": 2, "dash": "dash"}}
        ] if is_near else [],
        "annotations": [
            {"x": limit if is_near else 1, "xref": "x" if is_near else "paper", "y": 1, "yref": "paper",
             "text": f"limit {size(plan.memory_limit_bytes).text}" + ("" if is_near else ", far to the right"),
             "showarrow": False, "xanchor": "right", "yanchor": "top"}
        ],
        "legend": LEGEND,
        "margin": MARGIN,
    }  # fmt: skip
    text = f"Time against memory of {len(answer.considered)} plans that the search considered."
    return Figure("front", text, data, layout, 380)


def _points(
    name: str, points: Sequence[ConsideredPlan], unit: tuple[float, str], mode: str, marker: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": mode, "name": name, "marker": marker, "line": {"shape": "vh", "width": 1.5},
        "x": [float(f"{each.peak_memory_bytes / unit[0]:.5g}") for each in points],
        "y": [float(f"{each.step_time_s * 1e3:.6g}") for each in points],
        "text": ["<br>".join(textwrap.wrap(each.what, 60)) for each in points],
        "hovertemplate": f"%{{text}}<br>%{{y:,.4~r}} ms, %{{x:,.4~r}} {unit[1]}<extra></extra>",
    }  # fmt: skip


def front_table(answer: Answer) -> Table:
    """The front in numbers, from fast to small."""
    front = pareto_front(each for each in answer.considered if not each.is_simulated)
    last = len(front) - 1
    shown = front if last < _MOST_ROWS else [front[n * last // (_MOST_ROWS - 1)] for n in range(_MOST_ROWS)]
    rows = [(each.what, milliseconds(each.step_time_s), size(each.peak_memory_bytes)) for each in shown]
    return Table("The front, from fast to small", ("most layers", "ms", "memory"), tuple(rows))
