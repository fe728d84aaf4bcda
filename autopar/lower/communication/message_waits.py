"""Waits for a message of gloo, which look meanwhile whether it will ever come.

A rank that waits for a collective of gloo gives up every few seconds, looks what other ranks say, and waits on
(`torch_groups.wait_for`).  A message can't be waited for like that: gloo closes the connection where a wait for one
passes its limit ("Application timeout caused pair closure", ``tcp/unbound_buffer.cc``).  So a thread waits for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch.distributed as dist

__all__ = ["wait_for_message"]

_Task = Callable[[], None]
_IDLE: list[SimpleQueue[_Task]] = []  # what threads with nothing to wait for take their next task from
os.register_at_fork(after_in_child=_IDLE.clear)  # which has no threads


def wait_for_message(work: dist.Work, every_s: float, meanwhile: Callable[[], None]) -> None:
    """Wait until a message is sent or received, and call `meanwhile`, which may raise, as often as it takes `every_s`
    more.  Where it does, a thread goes on waiting.

    Raises:
        RuntimeError: the connection to the other rank is lost.
    """
    ended = SimpleQueue[BaseException | None]()
    tasks = _IDLE.pop() if _IDLE else _start()

    def wait() -> None:
        error: BaseException | None = None
        try:
            work.wait()
        except BaseException as caught:  # noqa: BLE001  (it is raised where the message is waited for)
            error = caught
        _IDLE.append(tasks)
        ended.put(error)

    tasks.put(wait)
    while True:
        try:
            error = ended.get(timeout=every_s)
        except Empty:
            meanwhile()
        else:
            if error is not None:
                raise error
            return


def _start() -> SimpleQueue[_Task]:
    tasks = SimpleQueue[_Task]()
    threading.Thread(target=_serve, args=(tasks,), daemon=True).start()
    return tasks


def _serve(tasks: SimpleQueue[_Task]) -> None:
    while True:
        tasks.get()()
