"""The command line: ``python -m autopar.explain TARGET --cluster 8x8xh100``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import AutoparError, QuestionError
from autopar.explain.asked import Asked, change, parse_cluster
from autopar.explain.checking import check_plan_file
from autopar.explain.comparison import compare_plans
from autopar.explain.documents import describe_difference, describe_findings, describe_plan, describe_sweep
from autopar.explain.explanation import explain
from autopar.explain.findings import Findings
from autopar.explain.forced import forced_choices
from autopar.explain.planner import Planner
from autopar.explain.report import write_report
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
    add("--html", metavar="PAGE", help="write a report with charts, one file that needs no network")
    add("--trace", metavar="TRACE", help="write the simulated step for https://ui.perfetto.dev")
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def _run(options: argparse.Namespace) -> int:
    printer = Printer()
    for path in filter(None, (options.save, options.html, options.trace)):
        # Said before a search, not after it.
        if not Path(path).absolute().parent.is_dir():
            raise QuestionError(
                f"{path!r} can't be written: there is no folder {str(Path(path).parent)!r}; make it first"
            )
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
    if options.sweep and not options.html:
        return _show_sweep(options, printer, planner, asked)
    if options.check:
        return check_plan_file(planner, asked, options.check, printer, as_json=options.json)
    return _explain(options, printer, planner, asked)


def _explain(options: argparse.Namespace, printer: Printer, planner: Planner, asked: Asked) -> int:
    answer = planner.answer(asked)
    findings = Findings(
        options.target,
        answer,
        explain(answer),
        tuple(forced_choices(planner, answer, options.why_seconds)) if options.why_seconds > 0 else (),
        tuple((text, planner.answer(change(asked, text)).plan) for text in options.what_if),
        (options.sweep or "", tuple(sweep(planner, asked, options.sweep)) if options.sweep else ()),
    )
    _write_files(options, findings)
    if options.json:
        printer.json(describe_findings(findings))
    else:
        printer.findings(findings)
    return 0


def _write_files(options: argparse.Namespace, findings: Findings) -> None:
    if options.save:
        _write(options.save, findings.answer.plan.to_json())
    if options.html:
        write_report(options.html, findings)
    if options.trace:
        _write(options.trace, findings.timeline.to_chrome())
    for path in filter(None, (options.save, options.html, options.trace)):
        sys.stderr.write(f"wrote {path}\n")


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise QuestionError(f"{path!r} can't be written: {error.strerror}. Name another file") from error


def _show_plan(options: argparse.Namespace, printer: Printer, plan: Plan) -> int:
    if options.json:
        printer.json({"plan": describe_plan(plan)})
    else:
        printer.plan(plan)
    return 0


def _show_difference(options: argparse.Namespace, printer: Printer, title: str, first: Plan, second: Plan) -> int:
    if options.json:
        printer.json({"difference": describe_difference(first, second)})
    else:
        printer.difference(title, first, second, compare_plans(first, second))
    return 0


def _show_sweep(options: argparse.Namespace, printer: Printer, planner: Planner, asked: Asked) -> int:
    rows = tuple(sweep(planner, asked, options.sweep))
    if options.json:
        printer.json(describe_sweep(rows))
    else:
        printer.sweep(rows)
    return 0


def _load_plan(path: str) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise QuestionError(f"plan {path!r} can't be read: {error.strerror}") from error
