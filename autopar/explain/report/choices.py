"""What else there is: the search's front of time against memory, plans that came next, and answers to what-ifs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from autopar.explain.forced import ForcedRow
from autopar.explain.planner import Answer
from autopar.explain.runners_up import RunnerUp, pareto_front
from autopar.explain.sweep import SweepRow
from autopar.pages.shapes import (
    LEGEND,
    MARGIN,
    Cell,
    Figure,
    Number,
    Table,
    axis,
    count,
    digits,
    milliseconds,
    percent,
    size,
    size_unit,
)
from autopar.plan import Plan
from autopar.search import ConsideredPlan

__all__ = ["forced_table", "front_figure", "front_table", "runner_table", "sweep_table", "what_if_table"]

_MOST_BEHIND = 600
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
    grey, blue = {"size": 5, "opacity": 0.45, "color": "#8f8f8f"}, {"size": 7, "color": "#0072b2"}
    orange = {"size": 9, "color": "#e69f00", "symbol": "diamond"}
    data = (
        _points("looked at", behind[::step], (factor, unit), "markers", grey),
        _points("front: nothing is faster with as little memory", front, (factor, unit), "lines+markers", blue),
        _points("simulated", simulated, (factor, unit), "markers", orange),
        {
            "type": "scatter", "mode": "markers", "name": "the plan", "x": [plan.peak_memory_bytes / factor],
            "y": [plan.step_time_s * 1e3],
            "marker": {"size": 16, "symbol": "star", "color": "#d55e00", "line": {"width": 1}},
            "hovertemplate": f"the plan: %{{y:.4g}} ms, %{{x:.4g}} {unit}<extra></extra>",
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
    text = f"Time against memory of {len(answer.considered)} plans that the search looked at."
    return Figure("front", text, data, layout, 380)


def _points(
    name: str, points: Sequence[ConsideredPlan], unit: tuple[float, str], mode: str, marker: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": mode, "name": name, "marker": marker, "line": {"shape": "vh", "width": 1.5},
        "x": [float(f"{each.peak_memory_bytes / unit[0]:.5g}") for each in points],
        "y": [float(f"{each.step_time_s * 1e3:.6g}") for each in points],
        "text": ["<br>".join(textwrap.wrap(each.what, 60)) for each in points],
        "hovertemplate": f"%{{text}}<br>%{{y:.4g}} ms, %{{x:.4g}} {unit[1]}<extra></extra>",
    }  # fmt: skip


def front_table(answer: Answer, most: int = 12) -> Table:
    """The front in numbers, from fast to small."""
    front = pareto_front(each for each in answer.considered if not each.is_simulated)
    shown = front if len(front) <= most else [front[n * (len(front) - 1) // (most - 1)] for n in range(most)]
    rows = [(each.what, milliseconds(each.step_time_s), size(each.peak_memory_bytes)) for each in shown]
    return Table("The front, from fast to small", ("most layers", "ms", "memory"), tuple(rows))


def runner_table(rows: Sequence[RunnerUp]) -> Table:
    """The plans that came next."""
    cells = [
        (
            each.what,
            milliseconds(each.step_time_s),
            "yes" if each.is_simulated else "no: a sum",
            _change(each.loses),
            size(each.peak_memory_bytes),
        )
        for each in rows
    ]
    return Table(
        "The best plans of other kinds that fit",
        ("most layers", "ms", "simulated", "slower by", "memory"),
        tuple(cells),
    )


def forced_table(rows: Sequence[ForcedRow], plan: Plan) -> Table:
    """What it costs to decide otherwise."""
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        if row.step_s is None:
            cells.append((row.constraint, "-", row.problem, "-"))
        else:
            change = _change(row.step_s / plan.step_time_s - 1)
            cells.append((row.constraint, milliseconds(row.step_s), change, size(row.peak_bytes)))
    return Table("Other choices", ("constraint", "ms", "vs. the plan", "memory"), tuple(cells))


def what_if_table(rows: Sequence[tuple[str, Plan]], plan: Plan) -> Table:
    """New plans beside the first."""
    cells: list[tuple[Cell, ...]] = [_plan_row("as asked", plan, plan)]
    cells += [_plan_row(text, other, plan) for text, other in rows]
    columns = ("what if", "devices", "ms", "against the plan", "rows per second", "memory")
    return Table("What if", columns, tuple(cells))


def _plan_row(text: str, other: Plan, plan: Plan) -> tuple[Cell, ...]:
    rate = other.samples_per_step / other.step_time_s
    return (
        text, count(other.world_size), milliseconds(other.step_time_s),
        _change(other.step_time_s / plan.step_time_s - 1), Number(rate, digits(rate)),
        size(other.peak_memory_bytes),
    )  # fmt: skip


def sweep_table(text: str, rows: Sequence[SweepRow]) -> Table:
    """A plan for each value."""
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        if row.plan is None:
            cells.append((row.value, "-", "-", "-", "-", row.problem))
            continue
        rate = row.plan.samples_per_step / row.plan.step_time_s
        cells.append(
            (
                row.value, milliseconds(row.plan.step_time_s), Number(rate, digits(rate)), percent(row.efficiency),
                size(row.plan.peak_memory_bytes), row.brief,
            )
        )  # fmt: skip
    columns = (text.partition("=")[0], "ms", "rows per second", "efficiency", "memory", "most layers")
    return Table(f"Sweep over {text}", columns, tuple(cells))


def _change(share: float) -> Number:
    return Number(share, f"{share:+.1%}")
