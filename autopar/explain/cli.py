"""The command line: ``python -m autopar.explain TARGET --cluster 8x8xh100``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autopar.errors import QuestionError
from autopar.explain.alternatives import Alternative, forced_choices, sweep, sweep_questions, what_if
from autopar.explain.arguments import (
    add_question,
    check_writable,
    read_profile,
    read_question,
    read_seconds,
    run_command,
    write_text,
)
from autopar.explain.checking import check_plan, load_plan, rehearse
from autopar.explain.documents import describe_difference, describe_findings, describe_plan, describe_sweep
from autopar.explain.editing import parse_edit
from autopar.explain.explanation import explain
from autopar.explain.findings import Findings
from autopar.explain.formulas import describe_formulas
from autopar.explain.parallel_calls import call_in_parallel
from autopar.explain.planner import Planner
from autopar.explain.question import Question, change
from autopar.explain.report import write_report
from autopar.explain.tables import sweep_table
from autopar.explain.text import Printer
from autopar.plan import Plan

__all__ = ["main"]

_EPILOG = """
examples:
  python -m autopar.explain config.json --cluster 8x8xh100 --batch 64 --seq 8192
  python -m autopar.explain train.py:make --cluster 8xa100-80 --memory 70GiB --what-if nodes=2 --what-if memory=40GiB
  python -m autopar.explain train.py:make --cluster 8xh100 --sweep nodes=1,2,4,8
  python -m autopar.explain train.py:make --cluster 8xh100 --html report.html --trace trace.json
  python -m autopar.explain train.py:make --cluster 8xh100 --edit plan.json --set "layers.*: recompute=full"
  python -m autopar.explain train.py:make --cluster 8xh100 --check plan.json --rehearse
  python -m autopar.explain --diff a.json b.json
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 with one line on standard error for what a user can fix."""
    return run_command(_parser(), arguments, _run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m autopar.explain",
        description="Show, question and check the plan for a model on a cluster.  Needs no GPU and no weights.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_question(parser)
    add("--what-if", action="append", default=[], metavar="NAME=VALUE", help="such as memory=40GiB or nodes=16")
    add("--diff", nargs=2, metavar="PLAN", help="compare two saved plans")
    add("--edit", metavar="PLAN", help="write the best plan for changing (or go on with it), see --set")
    add(
        "--set",
        action="append",
        default=[],
        metavar="EDIT",
        help="with --edit: 'layers.*: recompute=full'",
    )
    add("--check", metavar="PLAN", help="check and price a saved (perhaps edited) plan against the best one")
    add("--rehearse", action="store_true", help="with --check: run it on simulated ranks and compare with one device")
    add("--why-seconds", type=read_seconds, default=18.0, help="time for pricing other choices (0: none; default: 18)")
    add("--html", metavar="PAGE", help="write a report with charts, one file that needs no network")
    add("--trace", metavar="TRACE", help="write the simulated step for https://ui.perfetto.dev")
    add("--formulas", action="store_true", help="also print what prices each op, as formulas of degrees")
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def _run(options: argparse.Namespace) -> int:
    printer = Printer()
    _check_combination(options)
    if options.diff:
        first, second = (load_plan(path) for path in options.diff)
        return _show_difference(options, printer, f"{options.diff[0]} -> {options.diff[1]}", first, second)
    if options.target is None:
        raise QuestionError("name a model (file.py:factory, config.json ...) or two plans (--diff a.json b.json)")
    if options.target.endswith(".json") and options.cluster is None:
        return _show_plan(options, printer, load_plan(options.target))
    question = read_question(options)
    planner = Planner(options.target, read_profile(options.profile, question))
    if options.sweep is not None and options.html is None:
        return _show_sweep(options, printer, planner, question)
    if options.edit is not None:
        return _edit(options, printer, planner, question)
    if options.check is not None:
        return _check(options, printer, planner, question)
    return _explain(options, printer, planner, question)


def _check_combination(options: argparse.Namespace) -> None:
    """Refuse options that would be passed over."""
    given = [name for name in ("edit", "check", "diff") if getattr(options, name) is not None]
    if len(given) > 1:
        raise QuestionError(f"--{given[0]} and --{given[1]} are two questions: ask one after the other")
    if options.set and options.edit is None:
        raise QuestionError(f"--set changes a plan: name it with --edit plan.json --set {options.set[0]!r}")
    if options.rehearse and options.check is None:
        raise QuestionError("--rehearse runs a plan: name it with --check plan.json --rehearse")
    if options.profile and options.cluster is None:
        raise QuestionError(
            f"--profile {options.profile} prices plans for devices: name them with --cluster 8x8xh100, and a model"
        )
    written = [path for path in (options.save, options.html, options.trace, options.edit) if path is not None]
    if written and options.target and options.cluster is None:
        raise QuestionError(
            f"to write {written[0]}, name a model and the devices: TARGET --cluster 8x8xh100 (a saved plan knows no "
            "model; its page comes with TARGET --cluster ... --check plan.json --html page.html)"
        )
    _check_all_read(options)
    check_writable(options, "save", "html", "trace", "edit")


_QUESTION = frozenset({
    "target", "cluster", "batch", "seq", "memory", "constraint", "optimizer", "precision", "compile", "imbalance",
    "documents", "lengths", "profile", "json", "why_seconds",
})  # fmt: skip


def _check_all_read(options: argparse.Namespace) -> None:
    """Refuse options that the answer to this question does not depend on."""
    if options.diff is not None:
        what, read = "--diff", {"diff", "json"}
    elif options.target and options.target.endswith(".json") and options.cluster is None:
        what, read = f"a saved plan without --cluster ({options.target})", {"target", "json"}
    elif options.edit is not None:
        what, read = "--edit", _QUESTION | {"edit", "set"}
    elif options.check is not None:
        what, read = "--check", _QUESTION | {"check", "rehearse", "html", "trace", "save"}
    elif options.sweep is not None and options.html is None:
        what, read = "--sweep (without --html)", _QUESTION | {"sweep", "weak"}
    else:
        return
    defaults = vars(_parser().parse_args([]))
    for name, value in vars(options).items():
        if name not in read and value != defaults[name]:
            flag = "a target" if name == "target" else f"--{name.replace('_', '-')}"
            raise QuestionError(f"{flag} changes nothing for {what}: leave it out, or ask for it apart")


def _explain(options: argparse.Namespace, printer: Printer, planner: Planner, question: Question) -> int:
    questions = [(text, change(question, text)) for text in options.what_if]  # wrong ones are said at once
    values = () if options.sweep is None else sweep_questions(planner, question, options.sweep, is_weak=options.weak)
    planner.program(question)  # once for all
    others = [partial(what_if, planner, *each) for each in questions if not each[1].is_replan_of(question)]
    sweeps = [partial(sweep, planner, values)] if values else []
    answer, *answers = call_in_parallel(partial(planner.answer, question), [*others, *sweeps])
    rows = answers.pop() if sweeps else ()
    if not options.json:
        printer.plan(answer.plan)  # what follows may take several times as long
    again = [partial(what_if, planner, *each) for each in questions if each[1].is_replan_of(question)]
    forced, *answers_again = _search_again(partial(forced_choices, planner, question, answer.plan), again, options)
    what_ifs = {row.change: row for row in (*answers, *answers_again)}
    in_order = tuple(what_ifs[text] for text, _ in questions)
    findings = Findings(options.target, answer, explain(answer), forced, in_order, (options.sweep or "", rows))
    if options.json:
        printer.json(describe_findings(findings))
    else:
        printer.findings(findings)
        if options.formulas:
            printer.line(describe_formulas(answer))
    _write_files(options, findings)
    return 0


def _search_again(
    force: Callable[[float], tuple[Alternative, ...]], again: Sequence[Callable[[], Alternative]],
    options: argparse.Namespace,
) -> list[Any]:  # fmt: skip
    """Other choices, if there is time for them, and the answers of `again`: in this process, or in copies of it that
    are made now, as some of what they need is known from the search before.
    """
    if options.why_seconds > 0:
        return call_in_parallel(partial(force, options.why_seconds), again)
    return [(), *(call_in_parallel(again[0], again[1:]) if again else ())]


def _write_files(options: argparse.Namespace, findings: Findings) -> None:
    """After the answer is printed, so that an error here does not lose it; the page is the slowest."""
    if options.save:
        write_text(options.save, findings.answer.plan.to_json())
    if options.trace:
        write_text(options.trace, findings.timeline.to_chrome())
    if options.html:
        write_report(options.html, findings)
        sys.stderr.write(f"wrote {options.html}\n")


def _edit(options: argparse.Namespace, printer: Printer, planner: Planner, question: Question) -> int:
    edits = tuple(map(parse_edit, options.set))
    is_new = not Path(options.edit).exists()
    checked = check_plan(planner, question, options.edit, edits, may_lack=True)
    plan = checked.answer.plan
    if is_new or edits:
        write_text(options.edit, plan.to_json())
    if options.json:
        printer.json(checked.describe())
    else:
        if edits:
            printer.difference("What the edits change", checked.before, plan)
            printer.line(f"{options.edit}: {checked.verdict}")
        printer.strategies(plan, options.edit)
    return 0 if checked.fits else 1


def _check(options: argparse.Namespace, printer: Printer, planner: Planner, question: Question) -> int:
    checked = check_plan(planner, question, options.check)
    plan = checked.answer.plan
    rehearsal = rehearse(planner, question, plan) if options.rehearse else None
    if options.json:
        printer.json(checked.describe() | {"rehearsal": str(rehearsal) if rehearsal else None})
    else:
        best = checked.best.plan
        printer.difference(f"The best plan -> {options.check}", best, plan)
        printer.line(f"{options.check}: {checked.verdict}")
        if rehearsal:
            printer.line(f"rehearsed: {rehearsal}")
    _write_files(options, Findings(options.target, checked.answer, explain(checked.answer)))
    return 0 if checked.fits else 1


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
        printer.difference(title, first, second)
    return 0


def _show_sweep(options: argparse.Namespace, printer: Printer, planner: Planner, question: Question) -> int:
    rows = sweep(planner, sweep_questions(planner, question, options.sweep, is_weak=options.weak))
    if options.json:
        printer.json(describe_sweep(rows))
    else:
        printer.table(sweep_table(options.sweep, rows))
    return 0
