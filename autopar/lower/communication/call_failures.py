"""Errors that ranks leave in a store for others to find, by the number of the call in which they were raised."""

from __future__ import annotations

import pickle
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress

import torch.distributed as dist

from autopar.lower.communication.call_records import Store
from autopar.lower.communication.consensus import portable
from autopar.lower.communication.torch_groups import store_answers

__all__ = ["LOST_STORE", "CallFailures"]

LOST_STORE = "the store of the process group is gone; the process that hosts it, most often rank 0, has ended"
_LAST_WORDS_S = 2.0  # twice `POLL_S` of `call_consensus`: until then ranks that still run have found the error


class CallFailures:
    """What failed on a rank, and what it knows of failures of others; others learn that it ended when this is gone.

    Attributes:
        last_call: the last call of which this rank left its error, or found another's.
        text: what that was.
    """

    def __init__(self, store: Store, rank: int) -> None:
        """`store` is of all ranks that make these calls."""
        self.last_call = -1
        self.text = ""
        self._store = store
        self._rank = rank
        weakref.finalize(self, _say_ended, store, rank)

    def note(self, call: int, text: str) -> None:
        """This rank knows what failed in `call`."""
        self.last_call, self.text = call, text

    def leave(self, error: BaseException, call: int, *others: int) -> None:
        """Leave `error` for other ranks in this call, the present one, and in these."""
        if self.last_call == call:
            return
        self.note(call, f"{type(error).__name__}: {error}")
        with suppress(dist.DistError):
            self._store.set(f"spoke/{self._rank}", "")
            for number in (call, *others):
                self._store.set(f"{number}/failed", pickle.dumps((self._rank, portable(error))))
            self._store.check([f"spoke/{self._rank}"])  # a set does not wait for the server; others look at once

    @contextmanager
    def leaving(self, call: Callable[[], int]) -> Generator[None]:
        """Inside, what is raised is left for other ranks, too: in the call that is the present one by then."""
        try:
            yield
        except BaseException as error:
            self.leave(error, call())
            raise

    def find(self, call: int) -> tuple[int, Exception] | None:
        """A rank that failed in this call, and how, where that is news to this rank."""
        if self.last_call >= call or not self._store.check([f"{call}/failed"]):
            return None
        rank, error = pickle.loads(self._store.get(f"{call}/failed"))
        self._store.set(f"spoke/{self._rank}", "")
        return rank, error

    def ended_of(self, ranks: Iterable[int]) -> list[int]:
        """Which of these ranks ended, or let go of their model."""
        return [rank for rank in ranks if self._store.check([f"ended/{rank}"])]

    def has_any_ended(self) -> bool:
        """Whether one of all ranks did."""
        return self._store.check(["ended"])

    def describe_silent_ranks(self, world_size: int) -> str:
        """Which ranks have no error to tell, as far as is known a little later."""
        others = [rank for rank in range(world_size) if rank != self._rank]
        until_s = time.monotonic() + _LAST_WORDS_S
        while not self._store.check([f"spoke/{rank}" for rank in others]) and time.monotonic() < until_s:
            time.sleep(0.05)
        silent = [rank for rank in others if not self._store.check([f"spoke/{rank}"])]
        if not silent:
            return "All other ranks failed, too: look for their messages"
        return (
            f"No word from ranks {silent}: one of them ended or hangs, most likely, or waits in a collective of the "
            "script's own (dist.barrier, dist.all_reduce) that this rank did not call; look for its message"
        )


def _say_ended(store: Store, rank: int) -> None:
    """Whoever waits for `rank` can stop."""
    with suppress(Exception):
        if store_answers(store):
            store.set(f"ended/{rank}", "")
            store.set("ended", "")
