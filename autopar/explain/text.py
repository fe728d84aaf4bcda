"""Explanations as text for people: tables by rich, plain when piped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from autopar.explain.comparison import Difference, compare_plans
from autopar.explain.explanation import Explanation, kind_rows
from autopar.explain.findings import Findings
from autopar.explain.forced import ForcedRow, faster
from autopar.explain.runners_up import RunnerUp
from autopar.explain.sweep import SweepRow
from autopar.plan import Plan

__all__ = ["Printer"]


_PIPED_WIDTH = 110
_SHORT = {"activation communication": "act. comm", "parameter communication": "par. comm"}


class Printer:
    """Writes to the terminal, or plainly where the output is piped."""

    def __init__(self, console: Console | None = None) -> None:
        """`console` is for tests."""
        self._console = console or Console(highlight=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = _PIPED_WIDTH

    def findings(self, found: Findings) -> None:
        """The plan, why it is so, what else there was, and the answers to what-ifs."""
        plan = found.answer.plan
        self.plan(plan)
        self.explanation(found.explanation, plan.step_time_s)
        if found.explanation.runners_up:
            self.runners_up(found.explanation.runners_up)
        if found.forced:
            self.forced(found.forced, plan.step_time_s)
        for text, other in found.what_if:
            self.difference(f"What if {text}", plan, other, compare_plans(plan, other))
        if found.sweep[0]:
            self.sweep(found.sweep[1])
        self.certainty(found.explanation)

    def plan(self, plan: Plan) -> None:
        """The plan's own table."""
        self._console.print(str(plan), markup=False, soft_wrap=True)

    def explanation(self, found: Explanation, step_s: float) -> None:
        """Why this plan, and where time and bytes go."""
        self._title("Why this plan")
        self._console.print(found.binds, markup=False)
        table = self._table("time spent on", "ms", "share")
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
        self._title("Layer kinds: ms per step and GiB per device, summed over the layers of a kind")
        kinds = self._table("layers", *(_SHORT.get(name, name) for name, _ in found.kinds[0].seconds), "GiB")
        for kind in found.kinds:
            names = kind.layers[0] if len(kind.layers) == 1 else f"{kind.layers[0]} .. ({len(kind.layers)})"
            gigabytes = sum(size for _, size in kind.num_bytes) / 2**30
            kinds.add_row(names, *(f"{seconds * 1e3:.3g}" for _, seconds in kind.seconds), f"{gigabytes:.3g}")
        self._console.print(kinds)

    def runners_up(self, rows: Sequence[RunnerUp]) -> None:
        """The plans that came next."""
        self._title("Runners-up: the best plans of other kinds")
        table = self._table("most layers run", "ms per step", "vs. the plan", "GiB per device")
        for row in rows:
            size = f"{row.peak_memory_bytes / 2**30:.3g}"
            about = "" if row.is_simulated else "at most "
            table.add_row(row.what, f"{row.step_time_s * 1e3:.4g}", f"{about}{row.loses:+.1%}", size)
        self._console.print(table)

    def certainty(self, found: Explanation) -> None:
        """What the numbers rest on, how near the optimum the plan is, and how long planning took."""
        self._title("Confidence")
        sources = ", ".join(f"{name} {share:.0%}" for name, share in found.sources if share)
        self.line(f"prices, by share of the step: {sources or 'none'}")
        self.line(f"peak memory: {_error(found.memory_error)}")
        self.line(f"within {found.optimality_gap:.1%} of the best plan in the search space")
        self.line("planning took " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.planning_s))

    def forced(self, rows: Sequence[ForcedRow], step_s: float) -> None:
        """What other decisions would cost."""
        self._title("What other choices cost")
        table = self._table("constraint", "ms per step", "vs. the plan", "GiB per device")
        for row in rows:
            if row.step_s is None:
                table.add_row(row.constraint, "-", row.problem, "-")
            else:
                change = f"{row.step_s / step_s - 1:+.1%}"
                table.add_row(row.constraint, f"{row.step_s * 1e3:.4g}", change, f"{row.peak_bytes / 2**30:.3g}")
        self._console.print(table)
        for row in faster(rows, step_s):
            self.line(
                f"{row.constraint} is faster than the plan, and the search did not consider it; ask for it with "
                f"--constraint {row.constraint}"
            )

    def strategies(self, plan: Plan, path: str) -> None:
        """What can be changed in a plan, and the commands that come next."""
        self._title(f"What can be changed in {path}")
        table = self._table("strategies", "layers", "axes", "zero", "recompute")
        for row in kind_rows(plan):
            names = row.layers[0] if len(row.layers) == 1 else f"{row.layers[0]} .. ({len(row.layers)})"
            number = next(layer.strategy for layer in plan.layers if layer.name == row.layers[0])
            table.add_row(f"[{number}]", names, row.axes, str(plan.strategies[number].zero), row.recompute)
        self._console.print(table)
        layer = plan.layers[len(plan.layers) // 2].name
        self.line("change it in an editor, or with the same command and any of:")
        edits = " ".join(f'--set "{layer}: {edit}"' for edit in ("recompute=full", "zero=3", "like=LAYER"))
        self.line(f"  --edit {path} {edits}")
        self.line("then:")
        self.line(f"  --check {path} [--rehearse]    does it fit, what does it cost, does it compute the same?")
        self.line(f'  autopar.parallelize(model, mesh, inputs, plan="{path}")    runs it')

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
            self._console.print("no decision differs")

    def sweep(self, rows: Sequence[SweepRow]) -> None:
        """One plan per value, with how well they scale."""
        self._title("Sweep")
        table = self._table("value", "devices", "ms per step", "rows per second", "efficiency", "GiB", "plan")
        for row in rows:
            if row.plan is None:
                table.add_row(row.value, "-", "-", "-", "-", "-", row.problem)
                continue
            plan = row.plan
            table.add_row(
                row.value, str(plan.world_size), f"{plan.step_time_s * 1e3:.4g}", f"{_rows_per_s(plan):.4g}",
                f"{row.efficiency:.0%}", f"{plan.peak_memory_bytes / 2**30:.3g}", row.brief,
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


def _error(error: float) -> str:
    return f"within {error:.1%}" if error else "error unknown: no comparable run was measured"


def _rows_per_s(plan: Plan) -> float:
    return plan.samples_per_step / plan.step_time_s if plan.step_time_s else 0.0
