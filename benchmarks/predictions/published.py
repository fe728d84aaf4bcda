"""Published training runs: ``python benchmarks/accuracy.py published [--csv FILE] [--json]``.

Predicts the throughput of published training runs from their configurations (`benchmarks/published`).  It prints the
error of each source and each kind of GPU, and for each source also the error that is left when the calibrated
constants are fitted without it.  With ``--json`` the last line is ``{"mean_absolute_error": ..., "rows": ...}`` over
every row that could be priced (null without any).
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from autopar.errors import MissingPriceError
from benchmarks.published import Run, UnpricedRowError, predict_s, read_runs
from benchmarks.published.holdout import Fitter

_PUBLISHED = Path(__file__).parents[1] / "published" / "throughput.csv"


class Outcome(NamedTuple):
    """A priced row and the relative error of its throughput, positive if it was predicted faster than it is."""

    run: Run
    error: float


class Priced(NamedTuple):
    """A priced table: the rows with a price, and (id, reason) of the others."""

    outcomes: list[Outcome]
    skipped: list[tuple[str, str]]

    @property
    def mean_absolute_error(self) -> float:
        """Over all rows with a price."""
        return mean_absolute(self.outcomes)


def mean_absolute(outcomes: list[Outcome]) -> float:
    """Mean absolute error; 0 without rows."""
    return sum(abs(outcome.error) for outcome in outcomes) / max(1, len(outcomes))


def price_rows(path: str | Path) -> Priced:
    """Predict every row of the table in `path`; a table that can't be read is one row without a price."""
    priced = Priced([], [])
    try:
        rows = read_runs(path)
    except (OSError, csv.Error) as reason:
        return Priced([], [(str(path), f"not read: {reason}")])
    for row in rows:
        if isinstance(row, tuple):
            priced.skipped.append(row)
            continue
        try:
            error = row.measured_s / predict_s(row) - 1
        except (UnpricedRowError, MissingPriceError, ArithmeticError, ValueError) as reason:
            priced.skipped.append((row.id, str(reason)))
            continue
        if math.isfinite(error):
            priced.outcomes.append(Outcome(row, error))
        else:
            priced.skipped.append((row.id, "its sizes are beyond every price"))
    return priced


def hold_out(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    """Per source, the errors of its rows with constants that were fitted to all other sources only."""
    fitter = Fitter(outcome.run for outcome in outcomes)
    held: dict[str, list[Outcome]] = {}
    for family in sorted({outcome.run.family for outcome in outcomes}):
        fitted = fitter.fit(outcome.run for outcome in outcomes if outcome.run.family != family)
        own = [outcome.run for outcome in outcomes if outcome.run.family == family]
        held[family] = [Outcome(run, fitter.error(run, fitted)) for run in own]
    return held


def _groups(outcomes: list[Outcome], column: str) -> list[tuple[str, list[Outcome]]]:
    groups: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[getattr(outcome.run, column)].append(outcome)
    return sorted(groups.items())


def print_table(priced: Priced) -> None:
    """Errors per source and per GPU, and over all rows; then what has no price, and why."""
    held = hold_out(priced.outcomes)
    print(f"{'rows':>5} {'error':>7} {'bias':>7} {'held out':>9}  {'worst row':<19}")
    for column in ("family", "gpu"):
        for name, group in _groups(priced.outcomes, column):
            worst = max(group, key=lambda outcome: abs(outcome.error))
            bias = sum(outcome.error for outcome in group) / len(group)
            without = f"{mean_absolute(held[name]):9.1%}" if name in held else " " * 9
            print(
                f"{len(group):5d} {mean_absolute(group):7.1%} {bias:+7.1%} {without}  "
                f"{worst.run.id:<11} {worst.error:>+7.1%}  {name}"
            )
        print()
    for reason, group in _reasons(priced.skipped):
        print(f"not priced, {len(group)} rows: {reason}: {', '.join(group)}")
    for assumption, group in _reasons([(o.run.id, text) for o in priced.outcomes for text in o.run.assumed]):
        print(
            f"assumed of {len(group)} rows: {assumption}: {', '.join(group[:12])}{', ...' if len(group) > 12 else ''}"
        )
    everything = [outcome for group in held.values() for outcome in group]
    print(
        f"all {len(priced.outcomes)} rows: mean absolute error {priced.mean_absolute_error:.1%}; "
        f"each source with constants fitted to the others: {mean_absolute(everything):.1%}"
    )


def _reasons(skipped: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in skipped:
        reasons[reason].append(name)
    return sorted(reasons.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may follow ``accuracy.py published``."""
    parser.add_argument("--csv", type=Path, default=_PUBLISHED)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(options: argparse.Namespace) -> int:
    """Print the table; returns the exit status."""
    priced = price_rows(options.csv)
    print_table(priced)
    if options.json:
        error = priced.mean_absolute_error if priced.outcomes else None
        print(json.dumps({"mean_absolute_error": error, "rows": len(priced.outcomes)}))
    return 0
