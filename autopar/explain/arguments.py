"""What the commands ``explain`` and ``plan`` have in common: the arguments of a question, and files that they write."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from autopar.cost import Profile
from autopar.cost.profile_file import load_profile
from autopar.errors import AutoparError, MissingPriceError, ProfileError, QuestionError
from autopar.explain.question import Question, parse_cluster
from autopar.progress import shown

__all__ = ["add_question", "check_writable", "read_profile", "read_question", "run_command", "write_text"]


def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, run: Callable[[argparse.Namespace], int]
) -> int:
    """The exit status: that of `run`, or 1 with one line on standard error for what a user can mend."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0], parser.format_help().split(), 1)
        parser.error(f"there is no {unknown[0]}" + (f": did you mean {near[0]}?" if near else ": see --help"))
    try:
        with shown():
            return run(options)
    except AutoparError as error:
        sys.stderr.write(f"{parser.prog}: {type(error).__name__}: {error}\n")
        return 1


def add_question(parser: argparse.ArgumentParser) -> None:
    """The arguments that `read_question` and `read_profile` read, ``--sweep`` and ``--save``."""
    add = parser.add_argument
    add("target", nargs="?", help="package.module:factory, file.py:factory, a Hugging Face config.json, or a plan.json")
    add("--cluster", metavar="NxDxNAME", help="nodes x devices per node x device, such as 8x8xh100, or a cluster file")
    add("--batch", type=_positive, help="rows of the global batch")
    add("--seq", type=_positive, help="tokens per row")
    add("--memory", help="memory per device that the plan may use, such as 70GiB")
    add("--constraint", action="append", default=[], metavar="TEXT", help="such as tensor=2; may be repeated")
    add("--optimizer", default="adamw", help="what will train the parameters (default: adamw)")
    add("--precision", help="dtype to compute in, such as bf16")
    add("--compile", action=argparse.BooleanOptionalAction, help="compile layers (default: on GPUs if it is faster)")
    add("--imbalance", help="rows of the busiest device of those that share experts, over the mean, such as 1.5")
    add("--documents", help="tokens of the documents that rows pack, such as 4096, or a file with one length a line")
    add("--lengths", metavar="FILE", help="of sequences, one a line, or quantiles: a family of plans for rows of them")
    add("--profile", metavar="FILE", help="price by what python -m autopar.profile measured, not by presets")
    add("--sweep", metavar="NAME=A,B,C", help="such as nodes=1,2,4,8: a plan for each")
    add("--weak", action="store_true", help="with --sweep nodes=...: the batch grows with the nodes (weak scaling)")
    add("--save", metavar="PLAN", help="write the plan as JSON")


def _positive(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number: write one, such as 64")
    return int(text)


def read_question(options: argparse.Namespace) -> Question:
    """What was asked.

    Raises:
        QuestionError: no model or no devices are named, or no such devices are known.
    """
    if options.target is None:
        raise QuestionError("name a model (file.py:factory, config.json ...) and the devices: --cluster 8x8xh100")
    if options.cluster is None:
        raise QuestionError("name the devices: --cluster 8x8xh100 (nodes x devices per node x device)")
    if options.weak and not options.sweep:
        raise QuestionError("--weak says how the batch of a sweep grows: --sweep nodes=1,2,4,8 --weak")
    return Question(
        parse_cluster(options.cluster), options.memory, options.batch, options.seq, tuple(options.constraint),
        options.optimizer, options.precision, options.compile, options.imbalance, options.documents,
        options.lengths,
    )  # fmt: skip


def read_profile(path: str | None, question: Question) -> Profile | None:
    """What was measured of the cluster's devices.

    Raises:
        QuestionError: there is no such profile, or it is of other devices.
    """
    if path is None:
        return None
    try:
        profile = load_profile(path)
    except (ProfileError, MissingPriceError) as error:
        raise QuestionError(
            f"--profile {path!r} is not a readable profile: measure one on such a device with "
            f"python -m autopar.profile --output {path}"
        ) from error
    if not question.cluster.has(profile.device):
        raise QuestionError(
            f"--profile {path!r} is of {profile.device}, but --cluster has {question.cluster.device.name}: name a "
            "profile of such a device, or leave it out to price by presets"
        )
    return profile


def check_writable(paths: Iterable[str]) -> None:
    """Say before a search, not after it, what can't be written.

    Raises:
        QuestionError: a path is a folder, or in none.
    """
    for path in paths:
        if Path(path).is_dir():
            raise QuestionError(f"{path!r} is a folder: name a file in it, such as {str(Path(path) / 'report.html')!r}")
        if not Path(path).absolute().parent.is_dir():
            folder = str(Path(path).parent)
            raise QuestionError(f"{path!r} can't be written: there is no folder {folder!r}; make it first")


def write_text(path: str, text: str) -> None:
    """Write a file, and say so on standard error.

    Raises:
        QuestionError: it can't be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise QuestionError(f"{path!r} can't be written: {error.strerror}. Name another file") from error
    sys.stderr.write(f"wrote {path}\n")
