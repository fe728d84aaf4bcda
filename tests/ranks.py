"""Run a function or a script as N gloo processes, within a time limit, and collect what each rank returns.

>>> run_ranks(torch.distributed.get_rank, 2)    # any function that can be imported
[0, 1]
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

__all__ = [
    "RanksError",
    "forking_context",
    "run_alone",
    "run_program",
    "run_ranks",
    "run_script",
    "share_traces_in",
    "traces_folder",
]

REPOSITORY = Path(__file__).resolve().parent.parent


class RanksError(AssertionError):
    """A rank raised, died, or did not end in time; the message holds every rank's traceback."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 400) -> list[Any]:
    """Call ``function(*args)`` on each of `world` processes that share a gloo process group.

    `function` must be importable (top level of a module), `args` and its results picklable.  The first rank
    that fails ends the others, so that an error never becomes a hang.

    Returns:
        Each rank's result, in rank order.

    Raises:
        RanksError: some rank raised, died, or ran longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return _in_processes(_in_group, world, (function, world, args, folder, timeout_s), folder, timeout_s)


def run_alone(function: Callable[..., Any], *args: Any, timeout_s: float = 400) -> Any:
    """What ``function(*args)`` returns in a new process without a process group, whatever tests ran in this one.

    Raises:
        RanksError: it raised, died, or ran longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="alone-") as folder:
        return _in_processes(_without_group, 1, (function, args), folder, timeout_s)[0]


def run_program(
    path: str | Path, world: int, args: Sequence[str] = (), timeout_s: float = 400, folder: Path = REPOSITORY
) -> str:
    """Run a script in `folder` as `run_script` does, in processes that have imported torch, transformers and autopar.

    Each sees the arguments and the environment that torchrun gives it; `world` 0 is one process without these.  What
    torchrun does besides is left out, so some script is to be run by `run_script`, too.

    Returns:
        What it printed (standard output, all ranks).

    Raises:
        RanksError: it failed, or ran longer than `timeout_s`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="program-") as results:
        given = (str(path), world, list(args), port, results, str(folder))
        _in_processes(_run_program, max(world, 1), given, results, timeout_s)
        return "".join(Path(results, f"printed{rank}").read_text() for rank in range(max(world, 1)))


def run_script(path: str | Path, world: int, args: Sequence[str] = (), timeout_s: float = 400) -> str:
    """Run a script of this repository under torchrun with `world` processes.

    Returns:
        What it printed (standard output, all ranks).

    Raises:
        RanksError: it failed, or ran longer than `timeout_s`.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    process = subprocess.Popen(
        [*launcher, str(path), *args],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, complained = process.communicate(timeout=timeout_s)
        reason = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun then ends its ranks; killed, it would leave them behind
        printed, complained = process.communicate(timeout=60)
        reason = f"ran longer than {timeout_s} s"
    if reason:
        raise RanksError(f"{path} on {world} ranks {reason}:\n{printed}\n{complained}")
    return printed


_TRACES: list[Path] = []


def traces_folder() -> Path:
    """Where the ranks that this process starts share their traces, with tests of all processes (`tests.conftest`)."""
    return _TRACES[0] if _TRACES else Path(_own_folder().name)


def share_traces_in(folder: Path) -> None:
    """From now on that is `folder`."""
    _TRACES[:] = [folder]


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="traces-")


def _in_group(
    rank: int, function: Callable[..., Any], world: int, args: tuple[Any, ...], folder: str, timeout_s: float
) -> Any:
    """`function`, on a rank of a gloo process group."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _without_group(_: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _run_program(rank: int, path: str, world: int, args: list[str], port: int, results: str, folder: str) -> None:
    with Path(results, f"printed{rank}").open("w") as printed:
        os.dup2(printed.fileno(), 1)
    if world:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests",
        }  # fmt: skip
    os.chdir(folder)
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()
    # The first rank hosts the store, which under torchrun is there until all ranks have ended.
    Path(results, f"ended{rank}").touch()
    while not rank and not all(Path(results, f"ended{each}").exists() for each in range(world)):
        time.sleep(0.02)  # if another rank fails, this one is killed


def forking_context() -> ForkServerContext:
    """How to start processes that have imported torch, transformers and autopar.

    Imports are most of what a short test costs: one process does them, and the others are forked from it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    return context


def _in_processes(
    function: Callable[..., Any], count: int, args: tuple[Any, ...], folder: str, timeout_s: float
) -> list[Any]:
    """``function(number, *args)`` in so many new processes; `folder` takes their results."""
    context = forking_context()
    traces = str(traces_folder())
    processes = [
        context.Process(target=_run, args=(function, number, args, folder, traces), daemon=True)
        for number in range(count)
    ]
    try:
        for process in processes:
            process.start()
        reason = _wait(processes, timeout_s)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return _collect(Path(folder), [process.exitcode for process in processes], reason)


def _run(function: Callable[..., Any], number: int, args: tuple[Any, ...], folder: str, traces: str) -> None:
    import torch

    from tests.shared_traces import share_traces

    torch.set_num_threads(1)
    share_traces(Path(traces))
    torch.manual_seed(0)
    try:
        outcome = (True, function(number, *args))
    except BaseException:  # noqa: BLE001  (whatever it is, it is reported to the parent)
        outcome = (False, traceback.format_exc())
    partial = Path(folder, f"rank{number}.partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(folder, f"rank{number}"))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: torch's DTensor caches keep the process group, whose threads may still let go of a tensor while
    # Python shuts down, and that ends the process with "terminate called" on a busy machine.
    os._exit(0 if outcome[0] else 1)


def _wait(processes: Sequence[Any], timeout_s: float) -> str:
    """Wait until all ended, one failed or time is up; say why the wait ended early, else ``""``."""
    end_s = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if time.monotonic() > end_s:
            return f"ran longer than {timeout_s} s"
        if any(process.exitcode for process in processes):
            time.sleep(0.5)  # the others may be about to say the same
            return "failed"
        time.sleep(0.02)
    return "failed" if any(process.exitcode for process in processes) else ""


def _collect(folder: Path, exitcodes: Sequence[int | None], reason: str) -> list[Any]:
    paths = [folder / f"rank{rank}" for rank in range(len(exitcodes))]
    outcomes = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
    if not reason and all(outcome is not None and outcome[0] for outcome in outcomes):
        return [outcome[1] for outcome in outcomes if outcome is not None]
    lines = [f"{len(exitcodes)} ranks: {reason or 'failed'}"]
    for rank, (outcome, code) in enumerate(zip(outcomes, exitcodes, strict=True)):
        said = "left no result" if outcome is None else "was fine" if outcome[0] else outcome[1]
        lines.append(f"--- rank {rank} (exit code {code}): {said}")
    raise RanksError("\n".join(lines))
