"""What a process does once, such as to register hooks, whichever thread asks first: simulated ranks are threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

__all__ = ["once"]


def once(action: Callable[[], None]) -> Callable[[], None]:
    """`action`, which runs in the first call, and again if it raised; threads that call meanwhile wait for it.

    ``functools.cache`` lets each of several threads that call at the same time run it.
    """
    lock = threading.Lock()
    pending = [action]

    @functools.wraps(action)
    def run() -> None:
        with lock:
            for act in pending:
                act()
            pending.clear()

    return run
