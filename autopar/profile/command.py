"""The command line: ``python -m autopar.profile``."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from autopar.cost.measure import CACHE_DIR, Alone, default_dtypes, dense_probes, profile_path, quick_probes
from autopar.cost.measure.missing import Progress, load_shared, measure_missing, missing_probes
from autopar.cost.measure.ranks import share_text
from autopar.cost.profile import Profile
from autopar.errors import AutoparError, ProfileError
from autopar.profile.command_options import matching_keys, read_axes, read_budget, read_dtypes, read_output
from autopar.profile.processes import choose_device, is_first_here, open_processes
from autopar.profile.table import print_probes, print_profile
from autopar.user_text.output_stream import checked_output

__all__ = ["main", "showing"]


_LINE_INTERVAL_S = 2.0  # between lines of progress in a log, which grows by 30 lines a minute


@contextmanager
def showing(console: Console, *, is_shown: bool) -> Generator[Callable[[Progress], None]]:
    """Yield a function that shows progress on `console`, or does nothing if not `is_shown`."""
    if not is_shown:
        yield lambda _: None
        return
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda progress: bar.update(
            task, total=progress.num_probes, completed=progress.num_done, description=progress.key
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_s = float("-inf")

    def __call__(self, progress: Progress) -> None:
        if progress.key and time.monotonic() - self._last_s < _LINE_INTERVAL_S:
            return
        self._last_s = time.monotonic()
        self._console.print(f"{progress.num_done}/{progress.num_probes} {progress.key}", highlight=False)


_DENSE_S = 120.0  # for all dense sweeps without --budget: more would lower the noise of medians
_QUICK_S = 5.0  # for all quick sweeps without --budget: the default of `measure_profile`
_PIPED_WIDTH = 130  # columns where the output isn't a terminal: the longest keys fit into the tables
_NUM_NAMED = 5
_NOISY = 0.5  # curves with a larger spread are reported as noisy
_EPILOG = """
examples:
  python -m autopar.profile                                            ops of this device
  torchrun --nproc-per-node 4 -m autopar.profile                       and collectives between 4 processes
  torchrun --nproc-per-node 4 -m autopar.profile --budget 60           stop after a minute; the next run continues
  python -m autopar.profile --device cuda --output profiles/h200.json  write another file
  python -m autopar.profile --show profiles/h200.json                  print it as tables
  python -m autopar.profile --remeasure 'matmul/*'                     repeat these measurements
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error on the first process of each node only."""
        if is_first_here():
            super().error(f"{message} (--help lists all options)")
        sys.exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0, or 1 with one line on standard error for errors of users."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with checked_output(parser.prog) as output:
        output.status = _answer(parser.prog, options)
    return output.status


def _answer(program: str, options: argparse.Namespace) -> int:
    prints_errors = True  # each process reports a missing device; later errors are the same on all processes
    try:
        if options.show:
            print_profile(_load(Path(options.show)), _console())
            return 0
        device = choose_device(options.device)
        prints_errors = is_first_here()
        return _run(options, device)
    except AutoparError as error:
        if prints_errors:
            sys.stderr.write(f"{program}: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        if is_first_here():
            sys.stderr.write("\ninterrupted: measurements are kept; run the same command again to continue\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m autopar.profile",
        description="Measure this machine and the links between its processes.  Earlier measurements are kept.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", metavar="TYPE", help="device to measure: cpu, cuda, ... (default: an accelerator if there is one)")
    add("--output", metavar="PATH", help="file to add to (default: the one that parallelize reads on this machine)")
    add("--budget", metavar="SECONDS", help="stop after about this time (default: run all probes, some minutes)")
    add(
        "--dtypes", metavar="A,B", help="of matrix products and attention (default: float32; on a GPU bfloat16,float32)"
    )
    add("--axes", metavar="SIZExSTRIDE,..", help="groups to measure, such as 4x1,2x4 (default: all that fit)")
    add("--group-sizes", metavar="A,B", help="measure only groups of these sizes, at all strides")
    add("--quick", action="store_true", help="measure only what parallelize itself would measure, in seconds")
    add("--only", action="append", default=[], metavar="KEYGLOB", help="measure only these keys: 'collective/*/2/1'")
    add("--remeasure", action="append", default=[], metavar="KEYGLOB", help="repeat these measurements: 'matmul/*'")
    add("--list", action="store_true", help="list the probes for this machine, and which have run; measure nothing")
    add("--show", nargs="?", const="", metavar="PATH", help="print a profile as tables; measure nothing")
    return parser


def _run(options: argparse.Namespace, device: torch.device) -> int:
    with open_processes(device) as communicator, _short_warnings():
        ranks = communicator or Alone(device)
        budget_s = read_budget(options.budget)
        dtypes = read_dtypes(options.dtypes, default_dtypes(device))
        axes = read_axes(options.axes, options.group_sizes, ranks.world_size)
        default_path = profile_path(CACHE_DIR, device, ranks.world_size)
        path = Path(share_text(ranks, lambda: str(read_output(options.output, default_path))))
        if options.show is not None:
            share_text(ranks, lambda: _show(path))
            return 0
        probes = (quick_probes if options.quick else dense_probes)(device, communicator, axes, dtypes)
        if options.only:
            only = matching_keys("--only", options.only, probes)
            probes = tuple(probe for probe in probes if not only.isdisjoint(probe.keys))
        again = matching_keys("--remeasure", options.remeasure, probes)
        ranks.prepare(axes)
        known = load_shared(ranks, path)
        missing = missing_probes(probes, known, again)
        if options.list:
            if ranks.rank == 0:
                print_probes(probes, missing, _console())
            return 0
        with showing(_console(), is_shown=ranks.rank == 0) as show:
            spend_s = budget_s or (_QUICK_S if options.quick else _DENSE_S)
            profile = measure_missing(
                ranks, missing, known, spend_s, path, on_progress=show, stops=budget_s is not None
            )
        if ranks.rank == 0:
            _summarize(profile, path, len(missing), len(missing_probes(missing, profile)))
        return 0


def _show(path: Path) -> str:
    print_profile(_load(path), _console())
    return ""


def _load(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except FileNotFoundError as error:
        cached = "".join(f"\n  {profile}" for profile in sorted(CACHE_DIR.glob("profile-*.json")))
        hint = f"; these exist:{cached}" if cached else ""
        raise ProfileError(f"--show: there is no {path}. Name a profile, or measure one first{hint}") from error
    except (OSError, ValueError) as error:
        raise ProfileError(f"--show: {path} can't be read: {error}. Name the JSON file of a profile") from error


def _summarize(profile: Profile, path: Path, num_missing: int, num_left: int) -> None:
    console = _console()
    if not num_missing:
        console.print("nothing was missing; --remeasure KEYGLOB repeats measurements")
    elif num_left:
        console.print(f"{num_left} of {num_missing} probes have not run yet; run the same command again to continue")
    console.print(
        f"curves: {len(profile.curves)}, readings: {len(profile.readings)}, in {path}\n"
        f"median spread {profile.spread:.0%}"
    )
    noisy = [key for key, curve in profile.curves.items() if curve.spread > _NOISY]
    if noisy:
        keys = ", ".join(noisy[:_NUM_NAMED]) + (", ..." if len(noisy) > _NUM_NAMED else "")
        console.print(f"noisy (spread above {_NOISY:.0%}): {keys}; --remeasure them on a quiet machine")


def _console() -> Console:
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


@contextmanager
def _short_warnings() -> Generator[None]:
    """Print warnings as one line, without the source code that caused them."""

    def write(message: Warning | str, *_: Any) -> None:
        sys.stderr.write(f"warning: {message}\n")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = write
        yield
