"""Whole training steps on 2 and 4 gloo ranks: ``python benchmarks/accuracy.py steps [--ranks 2 4] [--json]``.

Each group of processes (one thread each) profiles the machine, plans a model by search and by force as `parallelize`
does, and trains all plans in one launch, a few steps of each in turn, so that what else the machine does hits all of
them.  Plans that turn out equal run once and count once.  Printed are the predicted and the measured median step (of
the slowest rank), the spread of the steps (quartile distance over median), the seconds that a rank's thread and all its
threads worked, predicted / measured, the median of the ratios' distances from 1, and Kendall's tau of the plans' order;
also of those pairs alone whose steps differ by more than their spread.  The profile stays in ``--folder``, and is used
again.  ``--json`` ends with one line of all of it.  Only a quiet machine gives numbers that mean something.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.predictions._step_cases import CASES, MODELS

_FOLDER = Path("~/.cache/autopar/accuracy-steps").expanduser()

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    # Plans that take turns in one process find the heap as another one left it.  Else glibc gives memory back and
    # gets it again in each step, which a program that trains one model stops doing after some steps.
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TOP_PAD_": str(2**26),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``accuracy.py steps``."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=sorted(CASES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", nargs="+", default=[], help="only plans whose constraints have one of these in them")
    parser.add_argument("--rounds", type=int, default=4, help="how often the plans take turns")
    parser.add_argument(
        "--steps", type=int, default=2, help="measured steps of each plan in a round, behind another one"
    )
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for a profile from nothing")
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="where profiles are kept, and plans to look at")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if options.worker is not None:
        from benchmarks.predictions._step_worker import work  # noqa: PLC0415  (it starts the ranks' own torch)

        work(options)
        return 0
    groups: list[dict[str, Any]] = []
    for ranks, model in itertools.product(options.ranks, options.models):
        groups.append(_measure(options, ranks, model))
        _print(groups[-1])
    errors = [error for group in groups for error in _errors(group)]
    total = {"median_error": statistics.median(errors), "least_tau": min(group["tau"] for group in groups)}
    print(f"\nmedian error {total['median_error']:.1%}, least Kendall's tau of a group {total['least_tau']:.2f}")
    if options.json:
        print(json.dumps(total | {"groups": groups}))
    return 0


def _measure(options: argparse.Namespace, ranks: int, model: str) -> dict[str, Any]:
    """Start a group of processes; what its first one reports."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        script = str(Path(__file__).resolve().parents[1] / "accuracy.py")
        own = ("steps", "--worker", str(report), "--models", model, "--steps", str(options.steps))
        more = ("--rounds", str(options.rounds), "--folder", str(options.folder), "--budget", str(options.budget))
        only = ("--only", *options.only) if options.only else ()
        environment = os.environ | _ENVIRONMENT
        options.folder.mkdir(parents=True, exist_ok=True)
        subprocess.run((*command, script, *own, *more, *only), check=True, env=environment)
        group: dict[str, Any] = json.loads(report.read_text())
    return group | summary(group["rows"])


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The median error, and Kendall's tau of all pairs and of those that differ by more than their spread."""
    pairs = list(itertools.combinations(rows, 2))
    return {
        "median_error": statistics.median(_errors({"rows": rows})),
        "tau": kendall_tau(pairs),
        "tau_of_different": kendall_tau([pair for pair in pairs if _differ(*pair)]),
    }


def kendall_tau(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> float:
    """How alike the orders by prediction and by measurement are: 1 the same, -1 reversed; equal ones are neither."""
    signs = [
        (one["predicted_s"] - other["predicted_s"]) * (one["measured_s"] - other["measured_s"]) for one, other in pairs
    ]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / max(1, len(pairs))


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    spread_s = max(row["spread"] * row["measured_s"] for row in (one, other))
    return abs(one["measured_s"] - other["measured_s"]) > spread_s


def _errors(group: dict[str, Any]) -> list[float]:
    return [abs(row["predicted_s"] / row["measured_s"] - 1) for row in group["rows"]]


def _print(group: dict[str, Any]) -> None:
    print(f"\n{group['model']} on {group['ranks']} ranks, others had {group['others']:.1%} of the cores; milliseconds")
    heads = ("predicted", "measured", "spread", "ratio", "thread", "threads")
    print(f"{'plan':72s}" + "".join(f" {head:>9s}" for head in heads))
    for row in group["rows"]:
        predicted, measured, own, together = (row[key] * 1e3 for key in ("predicted_s", "measured_s", "own_s", "all_s"))
        print(
            f"{row['plan']:72s} {predicted:9.0f} {measured:9.0f} {row['spread']:9.1%} {predicted / measured:9.2f} "
            f"{own:9.0f} {together:9.0f}"
        )
    print(
        f"median error {group['median_error']:.1%}, Kendall's tau {group['tau']:.2f}, of plans that differ by more "
        f"than their spread {group['tau_of_different']:.2f}",
        flush=True,
    )
