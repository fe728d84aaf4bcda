"""Explanations as text for people: tables by rich, plain when piped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from autopar.explain.comparison import Difference
from autopar.explain.explanation import Explanation
from autopar.explain.forced import ForcedRow
from autopar.explain.sweep import SweepRow
from autopar.plan import Plan

__all__ = ["Printer"]


_SHORT = {"activation communication": "act. comm", "parameter communication": "par. comm"}


class Printer:
    """Writes to the terminal, or plainly where the output is piped."""

    def __init__(self, console: Console | None = None) -> None:
        """`console` is for tests."""
        self._console = console or Console(highlight=False, emoji=False)

    def plan(self, plan: Plan) -> None:
        """The plan's own table."""
        self._console.print(str(plan), markup=False, soft_wrap=True)

    def explanation(self, found: Explanation, step_s: float) -> None:
        """Why this plan, and where time and bytes go."""
        self._title("Why this plan")
        self._console.print(found.binds, markup=False)
        table = self._table("the step goes to", "ms", "share")
        for name, seconds in found.shares:
            if seconds:
                table.add_row(name, f"{seconds * 1e3:.4g}", _percent(seconds, step_s))
        self._console.print(table)
        if found.links:
            table = self._table("link", "collective", "runs", "MB per device", "ms")
            for row in found.links:
                table.add_row(
                    row.link, row.kind, str(row.runs), f"{row.num_bytes / 1e6:.4g}", f"{row.seconds * 1e3:.4g}"
                )
            self._console.print(table)
        self._title("Layer kinds: all layers of a kind together, ms of a step and GB per device")
        kinds = self._table("layers", *(_SHORT.get(name, name) for name, _ in found.kinds[0].seconds), "GB")
        for kind in found.kinds:
            names = kind.layers[0] if len(kind.layers) == 1 else f"{kind.layers[0]} .. ({len(kind.layers)})"
            gigabytes = sum(size for _, size in kind.num_bytes) / 1e9
            kinds.add_row(names, *(f"{seconds * 1e3:.3g}" for _, seconds in kind.seconds), f"{gigabytes:.3g}")
        self._console.print(kinds)
        sources = ", ".join(f"{name} {share:.0%}" for name, share in found.sources)
        self._console.print(f"prices of the step's seconds come from: {sources or 'unknown'}", markup=False)

    def forced(self, rows: Sequence[ForcedRow], step_s: float) -> None:
        """What it costs to decide otherwise."""
        self._title("What other choices cost")
        table = self._table("forced", "ms per step", "against the plan", "GB per device")
        for row in rows:
            if row.step_s is None:
                table.add_row(row.constraint, "-", row.problem, "-")
            else:
                change = f"{row.step_s / step_s - 1:+.1%}"
                table.add_row(row.constraint, f"{row.step_s * 1e3:.4g}", change, f"{row.peak_bytes / 1e9:.3g}")
        self._console.print(table)

    def difference(self, title: str, first: Plan, second: Plan, found: Sequence[Difference]) -> None:
        """Two plans side by side."""
        self._title(title)
        table = self._table("", "first", "second", "")
        for what, one, other, unit in (
            ("step", first.step_time_s * 1e3, second.step_time_s * 1e3, "ms"),
            ("rows per second", _rows_per_s(first), _rows_per_s(second), ""),
            ("peak memory", first.peak_memory_bytes / 2**30, second.peak_memory_bytes / 2**30, "GiB"),
        ):
            change = f"{other / one - 1:+.1%}" if one else ""
            table.add_row(f"{what} {unit}".strip(), f"{one:.4g}", f"{other:.4g}", change)
        for each in found:
            table.add_row(f"{each.where}: {each.what}", each.first, each.second, "")
        self._console.print(table)
        if not found:
            self._console.print("both decide the same")

    def sweep(self, rows: Sequence[SweepRow]) -> None:
        """One plan per value, with how well they scale."""
        self._title("Sweep")
        table = self._table("value", "devices", "ms per step", "rows per second", "efficiency", "GB", "plan")
        for row in rows:
            if row.plan is None:
                table.add_row(row.value, "-", "-", "-", "-", "-", row.problem)
                continue
            plan = row.plan
            table.add_row(
                row.value, str(plan.world_size), f"{plan.step_time_s * 1e3:.4g}", f"{_rows_per_s(plan):.4g}",
                f"{row.efficiency:.0%}", f"{plan.peak_memory_bytes / 1e9:.3g}", row.brief,
            )  # fmt: skip
        self._console.print(table)

    def json(self, data: Mapping[str, Any]) -> None:
        """What programs read: one object, with the format's version."""
        self._console.file.write(json.dumps({"autopar_explain": 1, **data}, indent=1) + "\n")

    def line(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _title(self, text: str) -> None:
        self._console.print(f"\n{text}", markup=False, style="bold")

    def _table(self, *columns: str) -> Table:
        table = Table(box=box.ASCII2 if not self._console.is_terminal else box.SIMPLE, pad_edge=False)
        for index, name in enumerate(columns):
            options: dict[str, Any] = {} if index == 0 else {"justify": "right"}
            table.add_column(name, overflow="fold", **options)
        return table


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _rows_per_s(plan: Plan) -> float:
    return plan.samples_per_step / plan.step_time_s if plan.step_time_s else 0.0
