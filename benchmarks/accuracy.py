"""Predicted beside measured: ``python benchmarks/accuracy.py published [--csv FILE] [--json]``.

``published`` predicts the throughput of published training runs from their configurations; see
`benchmarks/published.py`.  The last line is ``{"mean_absolute_error": ..., "rows": ...}`` over every row that could be
priced.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.published import Run, UnpricedRowError, predict_s, read_runs  # noqa: E402

_DEFAULT_CSV = Path(__file__).resolve().parents[2] / "shared" / "data" / "published_throughput.csv"


class Outcome(NamedTuple):
    """A priced row: its relative error in step time, positive if it was predicted slower than it is."""

    run: Run
    predicted_s: float
    error: float


def price_rows(path: str | Path) -> tuple[list[Outcome], list[tuple[str, str]]]:
    """Every row that can be priced, and (id, reason) of the others."""
    priced: list[Outcome] = []
    skipped: list[tuple[str, str]] = []
    for row in read_runs(path):
        if isinstance(row, tuple):
            skipped.append(row)
            continue
        try:
            predicted_s = predict_s(row)
        except UnpricedRowError as reason:
            skipped.append((row.id, str(reason)))
            continue
        # On throughput, as the sources report it.
        priced.append(Outcome(row, predicted_s, row.measured_s / predicted_s - 1))
    return priced, skipped


def mean_absolute_error(outcomes: list[Outcome]) -> float:
    """Of throughput, relative."""
    return sum(abs(outcome.error) for outcome in outcomes) / len(outcomes) if outcomes else 0.0


def print_table(title: str, outcomes: list[Outcome], key: Callable[[Run], str]) -> None:
    """Rows, error, bias and the worst row per group."""
    groups: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome.run)].append(outcome)
    print(f"\n{'rows':>5} {'error':>7} {'bias':>7}  {'worst row':<22} {title}")
    for name, group in sorted(groups.items()):
        worst = max(group, key=lambda outcome: abs(outcome.error))
        bias = sum(outcome.error for outcome in group) / len(group)
        print(
            f"{len(group):5d} {mean_absolute_error(group):7.1%} {bias:+7.1%}  "
            f"{worst.run.id:<11} {worst.error:>+8.1%}   {name}"
        )


def print_published(path: str | Path) -> None:
    """The whole table, and the summary as the last line's object."""
    outcomes, skipped = price_rows(path)
    print_table("source", outcomes, lambda run: run.family)
    print_table("GPU", outcomes, lambda run: run.gpu)
    for reason, count in Counter(reason for _, reason in skipped).items():
        names = [name for name, why in skipped if why == reason]
        print(f"\nnot priced ({count}): {reason}: {', '.join(names)}")
    print(f"\nall: {len(outcomes)} rows, mean absolute error {mean_absolute_error(outcomes):.1%}")


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["published"])
    parser.add_argument("--csv", type=Path, default=_DEFAULT_CSV)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    outcomes, _ = price_rows(options.csv)
    print_published(options.csv)
    if options.json:
        print(json.dumps({"mean_absolute_error": mean_absolute_error(outcomes), "rows": len(outcomes)}))


if __name__ == "__main__":
    main()
