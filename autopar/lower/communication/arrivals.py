"""Ranks wait in a store until all of them have come to a place, and name those that have not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from autopar.errors import RankError
from autopar.lower.communication.call_failures import CallFailures
from autopar.lower.communication.call_records import Store

__all__ = ["Arrivals"]

_POLL_PER_RANK_S = 2e-4  # looking whether all are there takes a third of that of the store's server
_WARN_S = 10.0  # nobody else says why nothing goes on; loading data or compiling may take as long
_LOGGER = logging.getLogger("autopar")


class Arrivals:
    """Which ranks have come where; places have names that all ranks know.

    Args:
        store: of these ranks.
        rank: this one.
        world_size: how many there are.
        failures: who has ended.
        timeout_s: how long `wait_for_all` waits.
    """

    def __init__(self, store: Store, rank: int, world_size: int, failures: CallFailures, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._failures = failures
        self._timeout_s = timeout_s

    def come(self, place: str) -> None:
        """This rank is there."""
        self._store.set(f"{place}/{self._rank}", "")
        self._store.add(place, 1)

    def has_all(self, place: str) -> bool:
        """Whether all ranks have come."""
        return self._store.add(place, 0) >= self._world_size

    def wait_while(self, place: str, may_come: Callable[[float], bool]) -> None:
        """Wait until all have come, or until `may_come`, given the seconds so far, says that some never will."""
        started_s, pause_s = time.monotonic(), 1e-3
        while not self.has_all(place) and may_come(time.monotonic() - started_s):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(0.1, _POLL_PER_RANK_S * self._world_size))

    def wait_for_all(self, place: str, where: str, look: Callable[[], None]) -> None:
        """Wait until all have come, calling `look` in between, which raises what another rank failed with.

        Args:
            where: what this rank does there, for messages.

        Raises:
            RankError: a rank has ended, or did not come in time.
        """
        warn_s = _WARN_S

        def may_come(waited_s: float) -> bool:
            nonlocal warn_s
            look()
            if waited_s > warn_s or self._failures.has_any_ended():
                self._complain(place, where, waited_s)
                warn_s = self._timeout_s
            return True

        self.wait_while(place, may_come)

    def _complain(self, place: str, where: str, waited_s: float) -> None:
        """Name the ranks that have not come; raise if they never will."""
        missing = [rank for rank in range(self._world_size) if not self._store.check([f"{place}/{rank}"])]
        ended = self._failures.ended_of(missing)
        if ended or (missing and waited_s > self._timeout_s):
            how = f"ranks {ended} ended, or let go of their model" if ended else f"ranks {missing} did not come to it"
            raise RankError(
                f"rank {self._rank} waited {waited_s:.0f} s in {where}, but {how}: all ranks must make the same "
                "calls in the same order, also to evaluate"
            )
        if missing and waited_s > _WARN_S:
            _LOGGER.warning("rank %d waits in %s for ranks %s", self._rank, where, missing)
