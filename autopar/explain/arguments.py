"""What the commands ``explain`` and ``plan`` have in common: the arguments of a question, and files that they write."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from autopar.cost import Profile
from autopar.cost.profile_file import load_profile
from autopar.errors import AutoparError, MissingPriceError, ProfileError, QuestionError
from autopar.explain.question import Question, parse_cluster
from autopar.user_text.output_stream import checked_output
from autopar.user_text.progress import shown

__all__ = [
    "add_question", "check_writable", "read_profile", "read_question", "read_seconds", "run_command", "write_text",
]  # fmt: skip


_EXAMPLES = {"--save": "plan.json", "--edit": "plan.json", "--html": "report.html", "--trace": "trace.json"}


def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, run: Callable[[argparse.Namespace], int]
) -> int:
    """The exit status: that of `run`, or 1 with one line on standard error for what a user can fix."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_unknown(parser, unknown[0]))
    with checked_output(parser.prog) as output:
        try:
            with shown():
                output.status = run(options)
        except AutoparError as error:
            sys.stderr.write(f"{parser.prog}: {type(error).__name__}: {error}\n")
            output.status = 1
    return output.status


def _unknown(parser: argparse.ArgumentParser, text: str) -> str:
    if not text.startswith("-"):
        return f"{text!r} is one argument too many: name one target, and write what has spaces in quotes"
    near = difflib.get_close_matches(text, re.findall(r"--[a-z-]+", parser.format_help()), 1)
    return f"there is no {text}" + (f": did you mean {near[0]}?" if near else ": see --help")


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


def read_seconds(text: str) -> float:
    """An argument that is a time.

    Raises:
        argparse.ArgumentTypeError: it is negative, or no number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if math.isnan(seconds) or seconds < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: write one, such as 30, or 0 for none")
    return seconds


def read_question(options: argparse.Namespace) -> Question:
    """What was asked.

    Raises:
        QuestionError: no model or no devices are named, or no such devices are known.
    """
    if options.target is None:
        raise QuestionError("name a model (file.py:factory, config.json ...) and the devices: --cluster 8x8xh100")
    if options.cluster is None:
        raise QuestionError("name the devices: --cluster 8x8xh100 (nodes x devices per node x device)")
    if options.weak and options.sweep is None:
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
            f"--profile {path!r} is not a readable profile ({error.__cause__ or error}): measure one on such a device "
            "with python -m autopar.profile --output profile.json"
        ) from error
    if not question.cluster.has(profile.device):
        raise QuestionError(
            f"--profile {path!r} is of {profile.device}, but --cluster has {question.cluster.device.name}: name a "
            "profile of such a device, or leave it out to price by presets"
        )
    return profile


def check_writable(options: argparse.Namespace, *names: str) -> None:
    """Say before a search, not after it, what can't be written.

    Args:
        options: of the command.
        names: those of `options` that are paths of files to write, if they are given.

    Raises:
        QuestionError: a path is a folder, or in none, or can't be written, or is that of a file that is read.
    """
    written = {f"--{name}": getattr(options, name) for name in names if getattr(options, name) is not None}
    for place, (name, path) in enumerate(written.items()):
        if not path:
            raise QuestionError(f"{name} '' names no file: write a path, such as {name} {_EXAMPLES[name]}")
        if Path(path).is_dir():
            raise QuestionError(f"{path!r} is a folder: name a file in it, such as {str(Path(path) / 'report.html')!r}")
        for other, taken in [*_files_read(options).items(), *[*written.items()][:place]]:
            if Path(path).absolute() == Path(taken).absolute() or _is_same_file(path, taken):
                raise QuestionError(f"{name} {path!r} would overwrite what {other} names: name another file")
        if not Path(path).absolute().parent.is_dir():
            folder = str(Path(path).parent)
            raise QuestionError(f"{path!r} can't be written: there is no folder {folder!r}; make it first")
        try:
            _try_to_write(Path(path))
        except OSError as error:
            raise QuestionError(f"{path!r} can't be written: {error.strerror}. Name another file") from error


def _files_read(options: argparse.Namespace) -> dict[str, str]:
    """The files that a command reads, by the options that name them."""
    target = options.target or ""
    read = {"the target": target if target.endswith(".json") else target.rpartition(":")[0]}
    read |= {f"--{name}": getattr(options, name, None) for name in ("cluster", "profile", "lengths", "documents")}
    return {name: path for name, path in read.items() if path and Path(path).is_file()}


def _is_same_file(path: str, other: str) -> bool:
    return Path(path).is_file() and Path(other).is_file() and Path(path).samefile(other)


def _try_to_write(path: Path) -> None:
    """Raise OSError where `path` can't be written; nothing is written, and no file is made."""
    if path.exists():
        path.open("a").close()
    else:
        TemporaryFile(dir=path.absolute().parent).close()


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
