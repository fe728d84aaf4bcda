"""Reports the progress of planning: one line for each phase, in the log and on a terminal.

Every phase is logged at level INFO of the logger ``"autopar"`` when it ends.  In a `shown` context it is also displayed
on standard error while it runs, if that is a terminal; nothing is written to files and pipes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["phase", "random_kept", "shown"]

_LOGGER = logging.getLogger("autopar")
_CONSOLE: ContextVar[Console | None] = ContextVar("_CONSOLE", default=None)


@contextmanager
def random_kept() -> Generator[None]:
    """After it Python's generator stands where it did: rich draws from it when it is imported, on some ranks only."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def shown(*, here: Callable[[], bool] = lambda: True, console: Console | None = None) -> Generator[None]:
    """Show the phases in this context on standard error, if that is a terminal and `here` returns True."""
    with random_kept():
        from rich.console import Console  # noqa: PLC0415  (rich isn't needed to import autopar)

    console = console or Console(stderr=True, highlight=False)
    token = _CONSOLE.set(console if here() and console.is_terminal else None)
    try:
        yield
    finally:
        _CONSOLE.reset(token)


@contextmanager
def phase(doing: str) -> Generator[None]:
    """A context for a phase of planning, such as ``"tracing the model"``; nested phases are only logged."""
    console = _CONSOLE.get()
    started = time.perf_counter()
    token = _CONSOLE.set(None)  # the terminal shows one phase at a time
    try:
        with console.status(f"autopar: {doing} ...") if console else nullcontext():
            yield
    finally:
        _CONSOLE.reset(token)
    done = f"{doing}: {time.perf_counter() - started:.1f} s"
    _LOGGER.info("%s", done)
    if console:
        console.print(f"autopar: {done}")
