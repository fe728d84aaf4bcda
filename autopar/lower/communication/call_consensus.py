"""Every call of a parallel module, compared across ranks before any of its collectives starts.

All ranks make the same calls in the same order: a training step, an evaluation, a gather of the whole state.  The first
rank to come to call number n writes what it is about to do into the process group's store, under n, and each other
rank, coming later, compares.  That is one exchange of some hundred bytes with the store: no rank waits for another and
no device is waited for.  Inputs on an accelerator are digested there, and their digests compared in the next call.
A store serves some ten thousand exchanges a second.  So where there are many ranks, those of a host compare in a store
that they alone use, and the first of them compares with other hosts.

A rank that finds a difference raises, and leaves its error in the store under n.  A rank that waits in a collective of
call n for longer than `POLL_S` looks for such an error, and raises it, too.  In the first call of its kind every rank
waits until all have compared: so what fails there fails before any rank has started a collective.

A rank that raises in the middle of call n leaves collectives and messages that nobody ends.  If all ranks come to call
n + 1 knowing of it, they wait for each other there, open new process groups (`renew`), and go on.  If one of them had
done its part of call n and went on, they have unlike parameters, most likely: then every later call is an error.

What waits inside a compiled layer, for a pipeline's neighbor or for an accelerator does not look: it ends when the
rank that raised does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, RankError
from autopar.lower.autograd import on_gradient
from autopar.lower.communication.arrivals import Arrivals
from autopar.lower.communication.call_differences import PLANNING, difference, gone_on
from autopar.lower.communication.call_failures import LOST_STORE, CallFailures
from autopar.lower.communication.call_records import NO_INPUTS, CallRecords, Named, Store
from autopar.lower.compat import leaves_of

__all__ = ["PLANNING", "POLL_S", "CallConsensus"]

T = TypeVar("T")

POLL_S = 1.0  # a collective that takes longer is rare, and a look at the store takes a ten thousandth of it
_BACKWARD = "the backward of "


class CallConsensus:
    """One rank's part in it.

    Attributes:
        is_in_step: whether the default random generators of all ranks stood at the same place in the first call; then
            they are compared in each.  Ranks may be seeded differently, as long as they pass the same batches.
        records: what they compare.
        is_torn: whether this rank left a call in its middle, so that new process groups are needed.
        num_gradients: how many parameters have gradients on this rank, to which the next call adds; 0: it adds to none,
            or ranks may have those of others.
        broken: why no further call is possible; ``""``: it is.
        close: ends what is left in the groups, here and on other ranks.
        renew: opens new ones, when all ranks are there.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout_s: float = 600.0,
        host_store: Store | None = None,
    ) -> None:
        """`store` is of these ranks alone, `host_store` of those on this host; `timeout_s` is how long the first call
        of a kind waits for all of them.
        """
        self.is_in_step = False
        self.records = CallRecords((store,) if host_store is None else (host_store, store), rank, device)
        self.is_torn = False
        self.num_gradients = 0
        self.broken = ""
        self.close: Callable[[], None] = lambda: None
        self.renew: Callable[[], None] = lambda: None
        self._store = store
        self._failures = CallFailures(store, rank)
        self._arrivals = Arrivals(store, rank, world_size, self._failures, timeout_s)
        self._rank = rank
        self._world_size = world_size
        self._number = 0
        self._counts: Counter[str] = Counter()
        self._met: set[str] = set()
        self._where = "parallelize"
        self._ran_backward = True

    def enter(
        self,
        kind: str,
        prepare: Callable[[], tuple[T, Named]],
        compared_first: Named | None = None,
        *,
        peers: str = "",
    ) -> T:
        """Begin a call, which all ranks make.

        Args:
            kind: what all ranks do now, with a place for its number, such as ``"training step {}"``.
            prepare: what may fail on bad input, before any collective; gives its result, and inputs by name, tensors
                and numbers, flags or text, which are to be the same on every rank.
            compared_first: inputs that are compared before `prepare` runs; every rank then waits for all others, as in
                the first call of a kind.
            peers: where inputs are to be the same on some ranks only, a name for these ranks.

        Raises:
            MeshError: inputs differ.
            InputShapeError: they differ in shape.
            RankError: another rank does something else, drew other random numbers, failed or ended.
            Exception: of `prepare`, on this rank; where another rank failed, an error of that kind.
        """
        what = kind.removeprefix(PLANNING)
        self._counts[what] += 1
        try:
            if kind in self._met and compared_first is None:
                return self._call(kind, prepare, peers)
            if compared_first is not None:  # all are here before `prepare` makes what a new form of inputs needs
                first = compared_first
                self._call(kind, lambda: (None, first), waits=True)
            result = self._call(kind, prepare, peers, waits=True)
        except dist.DistError as error:
            raise RankError(f"rank {self._rank} came to {self._where}, but: {LOST_STORE} ({error})") from error
        self._met.add(kind)
        if kind != what:  # the call itself follows, under the same number; where planning fails, the call has failed
            self._counts[what] -= 1
        return result

    def meets(self, what: str, within_s: float) -> bool:
        """Whether all ranks do `what`, which is no call, at the same time; waits so long for them.

        A rank that is not there makes another call, has ended, or does what this does not see, such as a barrier.

        Raises:
            Exception: another rank has failed.
        """
        self._counts[what] += 1
        place = f"{what}/{self._counts[what]}"

        def may_come(waited_s: float) -> bool:
            self._look_for_failure(self._number)
            has_gone_on = self._store.check([str(self._number + 1)]) or self._failures.has_any_ended()
            return waited_s < within_s and not has_gone_on

        self._arrivals.come(place)
        self._arrivals.wait_while(place, may_come)
        return self._arrivals.has_all(place)  # the last to come may be in its next call by now

    def watch_backward(self, outputs: Any) -> None:
        """See when a backward of this call begins, which gave `outputs`."""
        for x in leaves_of(outputs):
            if isinstance(x, Tensor) and x.requires_grad:
                self._ran_backward = False
                on_gradient(x, lambda _: self.backward_begins())

    def backward_begins(self) -> None:
        """A backward of this call begins on this rank."""
        if not self._ran_backward:
            self._ran_backward = True
            self._where = _BACKWARD + self._where

    @contextmanager
    def failing(self) -> Generator[None]:
        """Inside, others may have begun collectives; an error is left in the store for them to find."""
        try:
            with self._failures.leaving(lambda: self._number):
                yield
        except BaseException:
            self.is_torn = True
            self.close()  # after the error was told: this ends what other ranks wait for
            raise

    def look(self) -> None:
        """Raise if another rank has failed in this call, or will never come to the collective that this one is in."""
        following = str(self._number + 1)
        self._look_for_failure(self._number)
        if self._number - 1 > self._failures.last_call:  # this rank may have gone on before another one failed
            self._look_for_failure(self._number - 1)
        if self._where.startswith(_BACKWARD) and self._store.check([following]):
            rank, record = json.loads(self._store.get(following))
            if not record["backward"]:
                error = RankError(
                    f"rank {self._rank} is in {self._where}, but rank {rank} came to {record['call']} without one: "
                    "call backward() on every rank or on none"
                )
                self._failures.leave(error, self._number, self._number + 1)
                self.broken = str(error)
                raise error

    def _look_for_failure(self, number: int) -> None:
        failed = self._failures.find(number)
        if failed is None:
            return
        rank, error = failed
        found = type(error)(f"rank {rank} failed: {error}")
        if number < self._number:
            self.broken = gone_on(self._rank, rank, str(error))
            self._failures.leave(found, self._number)
        self._failures.note(self._number, str(found))
        raise found

    def lost(self, what: str, error: Exception) -> Exception:
        """The error to raise where the collective `what` ended in `error`, most often for want of another rank."""
        text = f"rank {self._rank} failed in {self._where}, {what}: {type(error).__name__}: {error}"
        try:
            self.look()
            self._failures.leave(RankError(text), self._number)
            silent = self._failures.describe_silent_ranks(self._world_size)
        except AutoparError as known:
            return known
        except dist.DistError:
            silent = LOST_STORE
        self.broken = text
        return RankError(
            f"{text}\n{silent}. The step can't be finished: end all processes and start again from the last checkpoint."
        )

    def _call(self, kind: str, prepare: Callable[[], tuple[T, Named]], peers: str = "", *, waits: bool = False) -> T:
        self._number += 1
        number = self._counts[kind.removeprefix(PLANNING)]
        self._where = kind.replace("{}", str(number), 1)  # what follows may have braces of its own
        backward, self._ran_backward = self._ran_backward, True
        starts_anew = self._failures.last_call == self._number - 1
        # Another rank may still be in a backward that this one does not run, or in the call that failed here.
        waits = waits or not backward or starts_anew
        with self._waiting_for_all() if waits else self.failing():
            if self.broken:
                raise RankError(
                    f"rank {self._rank} can't go on after an earlier call, in which ranks got out of step: "
                    f"{self.broken}\nParallelize the model anew from the last checkpoint; if a rank has ended, end all "
                    "processes and start again"
                )
            result, named = prepare()
            record = self.records.make(self._where, named, peers, waits=waits)
            record |= {"backward": backward, "gradients": self.num_gradients}
            record["failed"] = self._failures.text if starts_anew else ""
            if peers:
                self._compare("", record | NO_INPUTS)
            self._compare(peers, record)
        if starts_anew:
            self._start_anew()
        return result

    def _start_anew(self) -> None:
        """All ranks are here, and know that the call before failed."""
        if self._store.add(f"{self._number}/here/torn", 0):
            try:
                self.renew()
            except Exception as error:
                self.broken = f"{error}"
                raise RankError(f"rank {self._rank} can't begin anew after a call that failed: {error}") from error
        self.is_torn = False

    def _compare(self, peers: str, mine: dict[str, Any]) -> None:
        """Raise if the rank that came first, of this host or of all, wrote another record."""
        first = self.records.exchange(self._number, peers, mine)
        if first is None:
            return
        rank, theirs = first
        if mine["random"] != theirs["random"] and not self._met:
            self._store.set("unlike", "")
        if bool(mine["failed"]) != bool(theirs["failed"]):
            ahead, behind = (self._rank, rank) if theirs["failed"] else (rank, self._rank)
            self.broken = gone_on(ahead, behind, mine["failed"] or theirs["failed"])
            raise RankError(self.broken)
        error = difference(self._rank, mine, rank, theirs, has_peers=bool(peers), is_in_step=self.is_in_step)
        if error is not None:
            raise error

    @contextmanager
    def _waiting_for_all(self) -> Generator[None]:
        """Inside is what may fail on one rank; after it, raise on all if it did."""
        here = f"{self._number}/here"
        try:
            with self._failures.leaving(lambda: self._number):
                yield
        finally:
            if self.is_torn:
                self._store.add(f"{here}/torn", 1)
            self._arrivals.come(here)
        self._arrivals.wait_for_all(here, self._where, self.look)
        self.look()
        if not self._met:
            self.is_in_step = self.records.compares_draws and not self._store.check(["unlike"])
