"""The page's section about sequences of many lengths: distribution, family of plans, a usual and the worst batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autopar.balance import Assignment, BatchPlanner, Lengths
from autopar.balance.expectation import draw_batches
from autopar.explain.planner import Answer
from autopar.pages.html import Section
from autopar.pages.shapes import (
    LEGEND,
    MARGIN,
    SERIES,
    Figure,
    Table,
    axis,
    count,
    milliseconds,
    percent,
)
from autopar.plan import Plan
from autopar.planning.length_plans import read_distribution

__all__ = ["length_sections"]

_MOST_RANKS = 64  # bars that people tell apart; the worst rank is always among those that are drawn
_STEPS = 200  # points of the curve of lengths


def length_sections(answer: Answer) -> Iterator[Section]:
    """One section if the plan is a family for a distribution of lengths, else none."""
    expected = answer.plan.prediction.lengths
    given = read_distribution(answer.question.lengths)
    if given is None or not expected.plans:
        return
    lengths = given.clipped(expected.plans[0].row.tokens)
    gain = f"{expected.static_s / expected.step_time_s:.3f} times as long"
    own_ms, static_ms = (milliseconds(seconds).text for seconds in (expected.step_time_s, expected.static_s))
    text = (
        f"Sequences: {expected.lengths}.",
        f"A step with {expected.sequences:,} of them is expected to take {own_ms} ms: the mean of {expected.batches} "
        f"drawn batches, each by the plan that is fastest for it. The best single plan takes {static_ms} ms, {gain}.",
        "Bars: what each data-parallel rank, or group of devices, computes of a batch. All wait for the longest bar.",
    )
    batches = _usual_and_worst(answer.plan, lengths)
    figures = (_distribution(lengths), *(_batch_figure(name, each) for name, each in batches))
    yield Section(
        "lengths-section", "Lengths of sequences", text, figures, (_family_table(answer.plan), _gain_table(answer.plan))
    )


def _usual_and_worst(plan: Plan, lengths: Lengths) -> list[tuple[str, Assignment]]:
    planner = BatchPlanner(plan)
    expected = plan.prediction.lengths
    drawn = draw_batches(lengths, expected.sequences, expected.batches)
    ordered = sorted((planner.assign(batch) for batch in drawn), key=lambda each: each.step_time_s)
    return [("usual", ordered[len(ordered) // 2]), ("worst", ordered[-1])]


def _distribution(lengths: Lengths) -> Figure:
    shares = np.linspace(0.0, 1.0, _STEPS)
    curve = {
        "type": "scatter", "mode": "lines", "x": [lengths.quantile(float(share)) for share in shares],
        "y": [float(share) for share in shares], "line": {"color": SERIES[0]},
        "hovertemplate": "%{y:.1%} have at most %{x:,} tokens<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": axis("tokens", type="log"),
        "yaxis": axis("share of sequences", tickformat=".0%"),
        "margin": MARGIN,
    }
    return Figure("lengths-figure", "Share of sequences that have at most so many tokens", (curve,), layout)


def _batch_figure(name: str, assignment: Assignment) -> Figure:
    """Milliseconds of each rank by what they are spent on."""
    row = assignment.row_cost
    order = np.argsort(-assignment.work_s, kind="stable")[:_MOST_RANKS]
    rows_s = row.place_s * assignment.rows * row.tokens
    parts = [("tokens and places without one", [rows_s] * len(order)), ("attention", assignment.work_s[order].tolist())]
    if assignment.unlike:
        parts = [("sequences", assignment.work_s[order].tolist())]
    labels = [f"{int(group)} ({int(assignment.degrees[group])} devices)" for group in order]
    data: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": what, "y": labels, "x": [1e3 * value for value in values],
            "marker": {"color": SERIES[number]}, "hovertemplate": f"%{{x:,.3g}} ms<extra>{what}</extra>",
        }
        for number, (what, values) in enumerate(parts)
    ]  # fmt: skip
    layout = {
        "barmode": "stack", "xaxis": axis("ms"), "legend": LEGEND,
        "yaxis": axis("group of devices", autorange="reversed", type="category"), "margin": {**MARGIN, "t": 40},
    }  # fmt: skip
    step = f"a step of {milliseconds(assignment.step_time_s).text} ms with {len(assignment.lengths):,} sequences"
    about = f"The {name} of the drawn batches: {step}, largest / mean {assignment.imbalance:.2f}"
    return Figure(f"{name}-batch-figure", about, tuple(data), layout, height=120 + 18 * len(order))


def _family_table(plan: Plan) -> Table:
    rows = [
        (count(each.row.tokens), count(each.row.ranks), percent(each.share), milliseconds(each.step_time_s), each.axes)
        for each in plan.prediction.lengths.plans
    ]
    columns = ("tokens of a row", "data ranks", "of steps", "ms of a step", "how it runs")
    return Table("Plans of the family, and the steps that each is fastest for", columns, tuple(rows))


def _gain_table(plan: Plan) -> Table:
    expected = plan.prediction.lengths
    saved_s = expected.static_s - expected.step_time_s
    rows = [(name, milliseconds(seconds)) for name, seconds in (*expected.gains, ("all", saved_s))]
    return Table("What the family saves of a step", ("on", "ms"), tuple(rows))
