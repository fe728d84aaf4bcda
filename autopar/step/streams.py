"""The two streams of a device: one computes, one communicates.

What computing waits for runs at once, as soon as the collective that is under way has ended; what it does not wait for
runs in the order in which it was started.  A collective takes as long as it does alone; overlapped compute goes on at
``1 - taken`` of its speed (`benchmarks.published.overlap.both_s` is the closed form of one such pair).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from autopar.step.layer_work import Item

__all__ = ["Ran", "Streams"]


class Ran(NamedTuple):
    """An item, and when it ran."""

    item: Item
    start_s: float
    stop_s: float


class Streams:
    """Runs items one after the other and notes when; `now_s` is the clock of the computing stream."""

    def __init__(self) -> None:
        """At time 0, with nothing under way."""
        self.now_s = 0.0
        self.ran: list[Ran] = []
        self._queue: deque[Item] = deque()
        self._left_s = 0.0  # of the first in the queue
        self._started = 0  # how many have been started, and how many of them have ended
        self._ended = 0

    def start(self, items: Iterable[Item]) -> int:
        """Start collectives that overlap with compute; returns the ticket to wait for them."""
        for item in items:
            if not self._queue:
                self._left_s = item.seconds
            self._queue.append(item)
            self._started += 1
        return self._started

    def wait(self, ticket: int) -> None:
        """Compute nothing until everything up to this ticket has ended."""
        while self._ended < ticket:
            self._end_first()

    def run(self, item: Item) -> None:
        """Compute, or communicate while nothing computes."""
        if item.is_collective:
            self._communicate(item)
        else:
            self._compute(item)

    def _communicate(self, item: Item) -> None:
        if self._queue and self._left_s < self._queue[0].seconds:
            self._end_first()
        start_s = self.now_s
        self.now_s += item.seconds
        self.ran.append(Ran(item, start_s, self.now_s))

    def _compute(self, item: Item) -> None:
        start_s, left_s = self.now_s, item.seconds
        while self._queue and left_s > 0:
            speed = 1.0 - self._queue[0].taken
            done_s = speed * self._left_s  # of this item, until the collective ends
            if done_s > left_s:
                passed_s = left_s / speed
                self._left_s -= passed_s
                self.now_s += passed_s
                left_s = 0.0
            else:
                left_s -= done_s
                self._end_first()
        self.now_s += left_s
        self.ran.append(Ran(item, start_s, self.now_s))

    def _end_first(self) -> None:
        item = self._queue.popleft()
        self.now_s += self._left_s
        self.ran.append(Ran(item, self.now_s - item.seconds, self.now_s))
        self._ended += 1
        self._left_s = self._queue[0].seconds if self._queue else 0.0
