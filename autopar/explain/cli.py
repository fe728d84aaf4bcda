"""The command line: ``python -m autopar.explain TARGET --cluster 8x8xh100``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from autopar.errors import AutoparError, QuestionError
from autopar.explain.asked import Asked, change, parse_cluster
from autopar.explain.checking import check_plan_file
from autopar.explain.comparison import compare_plans
from autopar.explain.explanation import explain
from autopar.explain.forced import forced_choices
from autopar.explain.planner import Planner
from autopar.explain.sweep import sweep
from autopar.explain.text import Printer
from autopar.plan import Plan

__all__ = ["main"]

_EPILOG = """
examples:
  python -m autopar.explain config.json --cluster 8x8xh100 --batch 64 --seq 8192
  python -m autopar.explain train.py:make --cluster 8xa100-80 --memory 70GiB --what-if nodes=2 --what-if memory=40GiB
  python -m autopar.explain train.py:make --cluster 8xh100 --sweep nodes=1,2,4,8
  python -m autopar.explain train.py:make --cluster 8xh100 --save plan.json     (edit it, then:)
  python -m autopar.explain train.py:make --cluster 8xh100 --check plan.json
  python -m autopar.explain --diff a.json b.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 with one line on standard error for what a user can mend."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except AutoparError as error:
        sys.stderr.write(f"{parser.prog}: {type(error).__name__}: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar.explain",
        description="Show, question and check the plan for a model on a cluster.  Needs no GPU and no weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("target", nargs="?", help="package.module:factory, file.py:factory, a Hugging Face config.json, or a plan.json")
    add("--cluster", metavar="NxDxNAME", help="nodes x devices per node x device, such as 8x8xh100, or a cluster file")
    add("--batch", type=int, help="rows of the global batch")
    add("--seq", type=int, help="tokens per row")
    add("--memory", help="memory per device that the plan may use, such as 70GiB")
    add("--constraint", action="append", default=[], metavar="TEXT", help="such as tensor=2; may be repeated")
    add("--optimizer", default="adamw", help="what will train the parameters (default: adamw)")
    add("--precision", help="dtype to compute in, such as bf16")
    add("--what-if", action="append", default=[], metavar="NAME=VALUE", help="such as memory=40GiB or nodes=16")
    add("--sweep", metavar="NAME=A,B,C", help="such as nodes=1,2,4,8: a plan for each")
    add("--diff", nargs=2, metavar="PLAN", help="compare two saved plans")
    add("--check", metavar="PLAN", help="check and price a saved (perhaps edited) plan against the best one")
    add("--why-seconds", type=float, default=20.0, help="time for pricing other choices (0: none; default: 20)")
    add("--save", metavar="PLAN", help="write the plan as JSON")
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def _run(options: argparse.Namespace) -> int:
    printer = Printer()
    if options.diff:
        first, second = (_load_plan(path) for path in options.diff)
        return _show_difference(options, printer, f"{options.diff[0]} -> {options.diff[1]}", first, second)
    if options.target is None:
        raise QuestionError("name a model (file.py:factory, config.json ...) or two plans (--diff a.json b.json)")
    if options.target.endswith(".json") and options.cluster is None:
        return _show_plan(options, printer, _load_plan(options.target))
    if options.cluster is None:
        raise QuestionError("name the devices: --cluster 8x8xh100 (nodes x devices per node x device)")
    asked = Asked(
        parse_cluster(options.cluster), options.memory, options.batch, options.seq, tuple(options.constraint),
        options.optimizer, options.precision,
    )  # fmt: skip
    planner = Planner(options.target)
    if options.sweep:
        return _show_sweep(options, printer, planner, asked)
    if options.check:
        return check_plan_file(planner, asked, options.check, printer, as_json=options.json)
    return _explain(options, printer, planner, asked)


def _explain(options: argparse.Namespace, printer: Printer, planner: Planner, asked: Asked) -> int:
    answer = planner.answer(asked)
    plan = answer.plan
    if options.save:
        plan.save(options.save)
    found = explain(answer)
    forced = list(forced_choices(planner, answer, options.why_seconds)) if options.why_seconds > 0 else []
    others = [(text, planner.answer(change(asked, text)).plan) for text in options.what_if]
    if options.json:
        printer.json(
            {
                "plan": json.loads(plan.to_json()),
                "explanation": asdict(found),
                "forced": [asdict(row) for row in forced],
                "what_if": [
                    {"changed": text, "plan": json.loads(other.to_json()), "difference": _differences(plan, other)}
                    for text, other in others
                ],
            }
        )
        return 0
    printer.plan(plan)
    printer.explanation(found, plan.step_time_s)
    if forced:
        printer.forced(forced, plan.step_time_s)
    for text, other in others:
        printer.difference(f"What if {text}", plan, other, compare_plans(plan, other))
    _print_footer(printer, plan)
    return 0


def _print_footer(printer: Printer, plan: Plan) -> None:
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in plan.planning_s)
    printer.line(f"\nwithin {plan.optimality_gap:.1%} of the best plan in the search space; planning took {spent}")


def _show_plan(options: argparse.Namespace, printer: Printer, plan: Plan) -> int:
    if options.json:
        printer.json({"plan": json.loads(plan.to_json())})
    else:
        printer.plan(plan)
    return 0


def _show_difference(options: argparse.Namespace, printer: Printer, title: str, first: Plan, second: Plan) -> int:
    if options.json:
        printer.json({"difference": _differences(first, second)})
    else:
        printer.difference(title, first, second, compare_plans(first, second))
    return 0


def _show_sweep(options: argparse.Namespace, printer: Printer, planner: Planner, asked: Asked) -> int:
    rows = list(sweep(planner, asked, options.sweep))
    if not options.json:
        printer.sweep(rows)
        return 0
    printer.json(
        {
            "sweep": [
                {**asdict(replace(row, plan=None)), "plan": json.loads(row.plan.to_json()) if row.plan else None}
                for row in rows
            ]
        }
    )
    return 0


def _differences(first: Plan, second: Plan) -> dict[str, Any]:
    return {
        "step_time_s": [first.step_time_s, second.step_time_s],
        "peak_memory_bytes": [first.peak_memory_bytes, second.peak_memory_bytes],
        "decisions": [asdict(each) for each in compare_plans(first, second)],
    }


def _load_plan(path: str) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise QuestionError(f"plan {path!r} can't be read: {error.strerror}") from error
