"""Waits for a message of gloo, which look meanwhile whether it will ever come.

A rank that waits for a collective of gloo gives up every few seconds, looks what other ranks say, and waits on
(`torch_groups.wait_for`).  A message can't be waited for like that: gloo closes the connection where a wait for one
passes its limit ("Application timeout caused pair closure", ``tcp/unbound_buffer.cc``).  So a thread waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from autopar.lower.communication.idle_threads import IdleThreads

__all__ = ["wait_for_message"]

_THREADS = IdleThreads()


def wait_for_message(work: dist.Work, every_s: float, meanwhile: Callable[[], None]) -> None:
    """Wait until a message is sent or received, and call `meanwhile`, which may raise, as often as it takes `every_s`
    more.  Where it does, a thread goes on waiting.

    Raises:
        RuntimeError: the connection to the other rank is lost.
    """
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except BaseException as error:  # noqa: BLE001  (it is raised where the message is waited for)
            errors.append(error)

    ended = _THREADS.start(wait)
    while not ended.wait(every_s):
        meanwhile()
    if errors:
        raise errors[0]
