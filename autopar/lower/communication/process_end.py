"""What a rank waits for before Python ends: gloo's threads must have let go of the tensors of finished collectives.

A thread of gloo frees a collective's tensors after it has completed the collective, and acquires Python's lock (the
GIL) to do so.  A thread that waits for the lock when Python begins to end is unwound, through a C++ destructor, and the
process aborts: "terminate called without an active exception" (https://github.com/pytorch/pytorch/issues/190489).
``destroy_process_group`` joins these threads only if nothing else refers to the group, but a DeviceMesh does, and
DTensor's caches.  So a rank that ends right after a collective may abort, most likely on a busy machine.

torch has no call that waits for these threads, but Linux tells what each of them does.  A thread that waits for the
lock wakes up in each of Python's switch intervals: one that slept through two of them has nothing to free.
"""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import suppress
from pathlib import Path

from autopar.lower.once import once

__all__ = ["settle_gloo", "settle_gloo_at_exit"]

_THREADS = Path("/proc/self/task")
_GLOO = "pt_gloo_runloop"  # the name that ProcessGroupGloo gives to its threads
_LONGEST_INTERVAL_S = 0.05  # ten times Python's own: a program that sets more is to end, too
_LIMIT_S = 10.0  # a thread that is ready to run gets a core sooner, even on a busy machine; what may follow is no hang


@once
def settle_gloo_at_exit() -> None:
    """Call `settle_gloo` before Python ends."""
    atexit.register(settle_gloo)


def settle_gloo(limit_s: float = _LIMIT_S) -> bool:
    """Wait, without Python's lock, until no thread of gloo is about to ask for it, but for `limit_s` at most.

    A thread that waits for other ranks is not waited for.

    Returns:
        Whether it is so; also where there are no such threads, or where it is not known (not on Linux).
    """
    until_s = time.monotonic() + limit_s
    before, now = None, _gloo_threads()
    while now and not (now == before and all(state == "S" for _, state, _ in now)):
        if time.monotonic() > until_s:
            return False
        time.sleep(min(2 * sys.getswitchinterval(), _LONGEST_INTERVAL_S))
        before, now = now, _gloo_threads()
    return True


def _gloo_threads() -> list[tuple[str, str, tuple[str, ...]]]:
    """Of each thread of gloo: its number, its state (``S``: sleeping), and how often it gave up a core."""
    found: list[tuple[str, str, tuple[str, ...]]] = []
    with suppress(OSError):  # not on Linux
        for thread in sorted(_THREADS.iterdir()):
            with suppress(OSError):  # it has ended
                fields = dict(line.split(":\t", 1) for line in (thread / "status").read_text().splitlines())
                if fields["Name"] == _GLOO:
                    switches = tuple(fields[name].strip() for name in fields if name.endswith("ctxt_switches"))
                    found.append((thread.name, fields["State"][0], switches))
    return found
