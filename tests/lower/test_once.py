"""What is registered once is registered once by many threads, too."""

from __future__ import annotations

import threading
import time

from autopar.lower.once import once


def test_threads_that_call_together_run_it_once_and_wait() -> None:
    done: list[int] = []
    seen: list[int] = []

    @once
    def register() -> None:
        time.sleep(0.05)
        done.append(1)

    def call() -> None:
        register()
        seen.append(len(done))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(done), seen) == (1, [1] * 4)
