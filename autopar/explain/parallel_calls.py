"""Independent functions, called on several cores at once."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from autopar.host.cores import usable_cores
from autopar.user_text.progress import shown

__all__ = ["call_in_parallel"]

_Outcomes = list[tuple[bool, Any]]


def call_in_parallel(first: Callable[[], Any], others: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the functions return: `first` is called here, the others in copies of this process, one per spare core.

    What those return is pickled, and what they keep in memory (caches) is lost.  Where processes can't be copied, or a
    function fails in one, it is called here, after `first`, so that it raises what it raises.
    """
    spare = min(_spare_cores(), len(others))
    copies = [_Copy(others[start::spare]) for start in range(spare)]
    try:
        results = [first()]
        outcomes = [copy.outcomes() for copy in copies]
    finally:
        for copy in copies:
            copy.end()
    for index, function in enumerate(others):
        done, value = outcomes[index % spare][index // spare] if spare else (False, None)
        results.append(value if done else function())
    return results


def _spare_cores() -> int:
    """Further cores than the one that this process runs on; 0 where processes can't be copied."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 0
    return usable_cores() - 1


class _Copy:
    """A copy of this process that calls functions in order and sends back what they return."""

    def __init__(self, functions: Sequence[Callable[[], Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self._count = len(functions)
        self._receiver, sender = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(target=_call_all, args=(functions, sender), daemon=True)
        with warnings.catch_warnings():
            # What torch's threads hold does not matter to a copy that starts none (see `_call_all`).
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            self._process.start()
        sender.close()

    def outcomes(self) -> _Outcomes:
        """Whether each function returned, and what."""
        try:
            return self._receiver.recv()
        except (EOFError, OSError):  # it was killed, perhaps for memory
            return [(False, None)] * self._count

    def end(self) -> None:
        self._receiver.close()
        self._process.terminate()
        self._process.join()


def _call_all(functions: Sequence[Callable[[], Any]], sender: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that was copied ends its copies
    torch.set_num_threads(1)  # the threads that the process had are not copied, and waiting for them would be for ever
    outcomes: _Outcomes = []
    for function in functions:
        try:
            with shown(here=lambda: False):  # the process that was copied has the terminal
                outcomes.append((True, function()))
        except Exception:  # noqa: BLE001  (it is called again where it can be said)
            outcomes.append((False, None))
    sender.send(outcomes)
