"""The model's layers, first to last, with what each of them does: a colored strip, and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.pages.shapes import PATTERNS, SERIES, Cell, Figure, Table, axis, count, digits, milliseconds, size
from autopar.plan import LayerStrategy, Plan
from autopar.plan.layer_tables import layer_names, row_layers

__all__ = ["layer_strip", "layer_table"]

_MOST_TICKS = 26
_MAX_ROWS = 40
_FEW_STAGES = 24  # with more, borders without names
_NOTHING = "no recompute"
_FAINT = "rgba(143,143,143,0.25)"  # of what is not done: it calls for no look


_ROWS: tuple[tuple[str, Callable[[LayerStrategy], str]], ...] = (
    ("axes", lambda strategy: strategy.degrees),
    ("storage", lambda strategy: strategy.storage_name),
    (
        "recompute",
        lambda strategy: ", ".join(strategy.keeping) or _NOTHING,
    ),
)


def layer_strip(plan: Plan) -> Figure:
    """A bar per layer and kind of decision, colored by what is decided."""
    data: list[dict[str, Any]] = []
    for row, describe in _ROWS:
        values = [describe(plan.strategies[layer.strategy]) for layer in plan.layers]
        for value in dict.fromkeys(values):
            number = len(data)
            places = [place for place, other in enumerate(values) if other == value]
            data.append(
                {
                    "type": "bar", "orientation": "h", "name": value, "legendgroup": row,
                    "legendgrouptitle": {"text": row},
                    "base": [place - 0.5 for place in places], "x": [1] * len(places), "y": [row] * len(places),
                    "width": 0.86,
                    "marker": {
                        "color": _FAINT if value == _NOTHING else SERIES[number % len(SERIES)],
                        "pattern": {"shape": PATTERNS[number // len(SERIES) % len(PATTERNS)]},
                        "line": {"width": 0.5, "color": "rgba(128,128,128,0.6)"},
                    },
                    "customdata": [_tell(plan, place) for place in places],
                    "hovertemplate": f"%{{customdata}}<br>{row}: {value}<extra></extra>",
                }
            )  # fmt: skip
    borders = [stage.start for stage in plan.stages[1:]]
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "xaxis": axis(
            "layer",
            range=[-0.5, len(plan.layers) - 0.5],
            showgrid=False,
            zeroline=False,
            tickformat="d",
            dtick=-(-len(plan.layers) // _MOST_TICKS),
        ),
        "yaxis": axis(fixedrange=True, autorange="reversed"),
        "shapes": [
            {
                "type": "line",
                "x0": x - 0.5,
                "x1": x - 0.5,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"width": 2, "dash": "dash"},
            }
            for x in borders
        ],
        "annotations": _stage_names(plan),
        "legend": {"orientation": "v", "tracegroupgap": 4},
        "margin": {"t": 28 if plan.stages else 8, "r": 8, "b": 40, "l": 8},
    }
    kinds = f"{len(plan.layers)} layers with {len(plan.strategies)} strategies"
    stages = f", cut into {len(plan.stages)} pipeline stages" if plan.stages else ""
    return Figure("layers", f"Strip of {kinds}{stages}; the table below has the same.", tuple(data), layout, 300)


def _tell(plan: Plan, place: int) -> str:
    layer = plan.layers[place]
    cost = plan.costs[place]
    return f"layer {place}: {layer.name}<br>{digits(cost.total_s * 1e3)} ms, {size(cost.persistent_bytes).text}"


def _stage_names(plan: Plan) -> list[dict[str, Any]]:
    if len(plan.stages) > _FEW_STAGES:
        return []
    return [
        {
            "x": (stage.start + stage.stop - 1) / 2, "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False,
            "text": f"stage {index} (group {stage.group})" if len(plan.stages) <= 8 else str(index),
        }
        for index, stage in enumerate(plan.stages)
    ]  # fmt: skip


def layer_table(plan: Plan) -> Table:
    """A row for consecutive layers of one stage that run the same program; if these are too many, for all that do."""
    rows = row_layers(plan.decisions, plan.prediction, [stage.start for stage in plan.stages], _MAX_ROWS)
    stage_of = [number for number, stage in enumerate(plan.stages) for _ in range(stage.start, stage.stop)]
    # Layers of several stages that run the same program share a row without a stage.
    has_stages = bool(plan.stages) and all(stage_of[layers[0]] == stage_of[layers[-1]] for layers in rows)
    columns = ("layers", "number", "axes", "storage", "recompute", "ms per layer", "memory per layer")
    cells = [((count(stage_of[layers[0]]),) if has_stages else ()) + _cells(plan, layers) for layers in rows]
    return Table(
        "Layers that run the same program, per device", (*(("stage",) if has_stages else ()), *columns), tuple(cells)
    )


def _cells(plan: Plan, layers: Sequence[int]) -> tuple[Cell, ...]:
    strategy, cost = plan.strategies[plan.layers[layers[0]].strategy], plan.costs[layers[0]]
    return (
        layer_names(plan.decisions, layers), count(len(layers)), strategy.degrees, strategy.storage_name,
        strategy.recompute_name, milliseconds(cost.total_s), size(cost.persistent_bytes),
    )  # fmt: skip
