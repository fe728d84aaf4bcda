"""Threads that stay for the next task."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

__all__ = ["IdleThreads"]


class IdleThreads:
    """Daemon threads, as many as tasks have run at the same time; a process that is forked begins without any."""

    def __init__(self) -> None:
        """There is none yet."""
        self._idle: list[SimpleQueue[Callable[[], None]]] = []  # what each takes its next task from
        os.register_at_fork(after_in_child=self._idle.clear)

    def start(self, task: Callable[[], None]) -> threading.Event:
        """Call `task`, which raises nothing, on an idle thread or a new one; the event says when it has ended."""
        ended = threading.Event()
        try:
            tasks = self._idle.pop()
        except IndexError:
            tasks = SimpleQueue[Callable[[], None]]()
            threading.Thread(target=_serve, args=(tasks,), daemon=True).start()

        def run() -> None:
            task()
            self._idle.append(tasks)
            ended.set()

        tasks.put(run)
        return ended


def _serve(tasks: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()
