"""The command ``autopar plan TARGET --cluster 8x8xh100``: what to do with a model on a cluster, in ten lines."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from autopar.explain.advice import advice_lines, advise
from autopar.explain.alternatives import sweep, sweep_questions
from autopar.explain.arguments import (
    add_question,
    check_writable,
    read_profile,
    read_question,
    read_seconds,
    run_command,
    write_text,
)
from autopar.explain.planner import Planner
from autopar.explain.tables import sweep_table
from autopar.explain.text import Printer

__all__ = ["main"]

# Three searches, each of some 10 to 30 s of a core for a large model: on a machine that has nothing else to do they all
# begin.
_BUDGET_S = 30.0

_EPILOG = """
examples:
  autopar plan config.json --cluster 8x8xh100 --batch 64 --seq 8192 --precision bf16 --save plan.json
  autopar plan train.py:make --cluster 8xa100-80 --memory 70GiB --seconds 0
  autopar plan train.py:make --cluster 8x8xh100 --sweep nodes=1,2,4,8 --weak

autopar explain, with the same arguments, shows the plan by layers, what other choices cost, and a page to look at.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 with one line on standard error for what a user can fix."""
    parser = argparse.ArgumentParser(
        prog="autopar plan",
        description="The fastest plan for a model on a cluster, why, what would help, how to run it.  Needs no GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_question(parser)
    parser.add_argument(
        "--seconds", type=read_seconds, default=_BUDGET_S,
        help="time for beginning searches for what would help (0: none; default: %(default)g)",
    )  # fmt: skip
    return run_command(parser, arguments, _run)


def _run(options: argparse.Namespace) -> int:
    question = read_question(options)
    check_writable(options, "save")
    planner = Planner(options.target, read_profile(options.profile, question))
    values = () if options.sweep is None else sweep_questions(planner, question, options.sweep, is_weak=options.weak)
    printer = Printer()
    advice = advise(planner, question, options.seconds)
    if options.save:
        write_text(options.save, advice.answer.plan.to_json())
    for line in advice_lines(advice, options.save):
        printer.line(line)
    if values and options.sweep is not None:
        printer.table(sweep_table(options.sweep, sweep(planner, values)))
    return 0
