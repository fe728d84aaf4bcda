"""Shows how far the measuring is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from autopar.cost.measure.missing import Progress

__all__ = ["showing"]

_EVERY_S = 2.0


@contextmanager
def showing(console: Console, *, is_shown: bool) -> Generator[Callable[[Progress], None]]:
    """What tells `console` of the progress, or nobody."""
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
        if progress.key and time.monotonic() - self._last_s < _EVERY_S:
            return
        self._last_s = time.monotonic()
        self._console.print(f"{progress.num_done}/{progress.num_probes} {progress.key}", highlight=False)
