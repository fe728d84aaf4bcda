"""Explanations as text for people: tables by rich, plain when piped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from autopar.explain.comparison import compare_plans
from autopar.explain.explanation import Explanation, kind_rows
from autopar.explain.findings import Findings
from autopar.explain.next_steps import next_steps
from autopar.explain.tables import (
    difference_table,
    forced_table,
    kind_name,
    kind_table,
    link_table,
    runner_table,
    share_table,
    sweep_table,
)
from autopar.pages.shapes import Number, Table
from autopar.plan import Plan
from autopar.plan.headline import describe_gap

__all__ = ["Printer"]

_PIPED_WIDTH = 80


class Printer:
    """Writes to the terminal, or plainly where the output is piped."""

    def __init__(self, console: Console | None = None) -> None:
        """`console` is for tests."""
        self._console = console or Console(highlight=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = _PIPED_WIDTH

    def findings(self, findings: Findings) -> None:
        """What there is to say of a plan that was printed: why it is so, what else there was, answers to what-ifs."""
        plan, explanation = findings.answer.plan, findings.explanation
        self._title("Why this plan")
        self.line(explanation.binds)
        self.table(share_table(explanation, plan.step_time_s))
        if explanation.links:
            self.table(link_table(explanation))
        self.table(kind_table(explanation.kinds))
        if explanation.runners_up:
            self.table(runner_table(explanation.runners_up))
        if findings.forced:
            self.table(forced_table(findings.forced, plan))
        for row in findings.what_if:
            if row.plan is not None:
                self.difference(f"What if {row.change}", plan, row.plan)
            else:
                self._title(f"What if {row.change}")
                self.line(f"no plan: {row.problem}")
        if findings.sweep[0]:
            self.table(sweep_table(*findings.sweep))
        self._confidence(explanation, plan)
        steps = tuple(next_steps(findings.answer, explanation, findings.forced))
        if steps:
            self._title("What to try next")
            for step in steps:
                self.line(step)

    def plan(self, plan: Plan) -> None:
        """The plan's own table."""
        self.line(str(plan))

    def _confidence(self, explanation: Explanation, plan: Plan) -> None:
        """What the numbers rest on, how near the optimum the plan is, and how long planning took."""
        self._title("Confidence")
        sources = ", ".join(f"{name} {share:.0%}" for name, share in explanation.sources if share)
        error = f"within {explanation.memory_error:.0%}" if explanation.memory_error else "unknown: no comparable run"
        self.line(f"prices, by share of the step: {sources or 'none'}")
        self.line(f"error of the predicted peak memory: {error}")
        self.line(describe_gap(plan.optimality_gap))
        self.line("planning took " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in explanation.planning_s))

    def strategies(self, plan: Plan, path: str) -> None:
        """What can be changed in a plan, and the commands that come next."""
        number = {layer.name: layer.strategy for layer in plan.layers}
        rows = [(number[row.layers[0]], row) for row in kind_rows(plan)]
        cells = [(f"[{n}]", kind_name(r.layers), r.axes, str(plan.strategies[n].zero), r.recompute) for n, r in rows]
        columns = ("strategies", "layers", "axes", "zero", "recompute")
        self.table(Table(f"What can be changed in {path}", columns, tuple(cells)))
        layer = plan.layers[len(plan.layers) // 2].name
        self.line("change it in an editor, or with the same command and any of:")
        edits = " ".join(f'--set "{layer}: {edit}"' for edit in ("recompute=full", "zero=3", "like=LAYER"))
        self.line(f"  --edit {path} {edits}")
        self.line("then:")
        self.line(f"  --check {path} [--rehearse]    does it fit, what does it cost, does it compute the same?")
        self.line(f'  autopar.parallelize(model, mesh, inputs, plan="{path}")    runs it')

    def difference(self, title: str, first: Plan, second: Plan) -> None:
        """Two plans compared."""
        differences = compare_plans(first, second)
        self.table(difference_table(title, first, second, differences))
        if not differences:
            self.line("no decision differs")
        if [layer.name for layer in first.layers] != [layer.name for layer in second.layers]:
            self.line("these are plans of different models: neither times nor rows per second say which is better")

    def table(self, table: Table) -> None:
        """A table below its caption."""
        self._title(table.caption)
        style = box.SIMPLE if self._console.is_terminal else box.ASCII2
        made = RichTable(box=style, pad_edge=False, padding=(0, 1, 0, 0))
        for name, is_number in table.headings:
            made.add_column(name, overflow="fold", justify="right" if is_number else "left")
        for row in table.rows:
            made.add_row(*(cell.text if isinstance(cell, Number) else cell for cell in row))
        self._console.print(made, markup=False)

    def json(self, data: Mapping[str, Any]) -> None:
        """What programs read: one object, with the format's version."""
        self._console.file.write(json.dumps({"autopar_explain": 1, **data}, indent=1) + "\n")

    def line(self, text: str) -> None:
        """One line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def _title(self, text: str) -> None:
        self._console.print(f"\n{text}", markup=False, style="bold")
