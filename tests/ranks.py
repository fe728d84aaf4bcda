"""Run a function or a script as N gloo processes, within a time limit, and collect what each rank returns.

>>> run_ranks(torch.distributed.get_rank, 2)    # any function that can be imported
[0, 1]
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["RanksError", "run_ranks", "run_script"]

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
    # Imports are most of what a short test costs: one process does them, and ranks are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    traces = _folder_of_traces().name
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            context.Process(
                target=_run_rank, args=(function, rank, world, args, folder, traces, timeout_s), daemon=True
            )
            for rank in range(world)
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


@cache
def _folder_of_traces() -> tempfile.TemporaryDirectory[str]:
    """Where the ranks that this process starts share their traces, until it ends."""
    return tempfile.TemporaryDirectory(prefix="traces-")


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    folder: str,
    traces: str,
    timeout_s: float,
) -> None:
    import torch
    import torch.distributed as dist

    from tests.shared_traces import share_traces

    torch.set_num_threads(1)
    share_traces(Path(traces))
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        outcome = (True, function(*args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  (whatever it is, it is reported to the parent)
        outcome = (False, traceback.format_exc())
    partial = Path(folder, f"rank{rank}.partial")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(Path(folder, f"rank{rank}"))
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
