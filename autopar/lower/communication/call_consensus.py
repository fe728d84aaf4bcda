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
import logging
import pickle
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, RankError
from autopar.lower.autograd import on_gradient
from autopar.lower.communication.call_differences import PLANNING, WITH_GRADIENT, difference, gone_on
from autopar.lower.communication.consensus import portable
from autopar.lower.communication.digests import digest_generators, digest_of, start_reading
from autopar.lower.communication.torch_groups import store_answers
from autopar.lower.compat import leaves_of

__all__ = ["PLANNING", "POLL_S", "CallConsensus", "Store"]

T = TypeVar("T")
Named = Iterable[tuple[str, Tensor | float | str]]

POLL_S = 1.0  # a collective that takes longer is rare, and a look at the store takes a ten thousandth of it
_POLL_PER_RANK_S = 2e-4  # looking whether all are there takes a third of that of the store's server
_WARN_S = 10.0  # nobody else says why nothing goes on; loading data or compiling may take as long
_LAST_WORDS_S = 2.0  # twice `POLL_S`: until then ranks that still run have found the error
_KEPT_CALLS = 1000  # a rank may be ahead of others where calls don't communicate; then records are deleted
_BACKWARD = "the backward of "
_NO_STEPS = 0, 0, ""  # how many steps optimizers made, a digest of their hyperparameters, and what the last one was
_LONGEST = 60  # characters of a plain argument in a record, and in an error
_FEW = 1024  # entries; of an input that is read in Python there are no more
_LOGGER = logging.getLogger("autopar")

_NO_STORE = "the store of the process group is gone; the process that hosts it, most often rank 0, has ended"


class Store(Protocol):
    """A store of torch.distributed."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        ...

    def get(self, key: str) -> bytes:
        """Read what is there."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Count, from 0; the sum."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all have been written."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` where nothing is written (and `expected` is ``""``); what is there then."""
        ...

    def delete_key(self, key: str) -> bool:
        """Forget."""
        ...


class CallConsensus:
    """One rank's part in it.

    Attributes:
        is_in_step: whether the default random generators of all ranks stood at the same place in the first call; then
            they are compared in each.  Ranks may be seeded differently, as long as they pass the same batches.
        compares_draws: whether ranks must draw the same numbers from these generators.
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
        self.compares_draws = True
        self.is_torn = False
        self.num_gradients = 0
        self.broken = ""
        self.close: Callable[[], None] = lambda: None
        self.renew: Callable[[], None] = lambda: None
        self._store = store
        self._stores = (store,) if host_store is None else (host_store, store)
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._timeout_s = timeout_s
        self._number = 0
        self._counts: Counter[str] = Counter()
        self._met: set[str] = set()
        self._where = "parallelize"
        self._ran_backward = True
        self._steps = _NO_STEPS
        self._told = -1  # the last call of which this rank left its error, or found another's
        self._failure = ""  # what that was
        self._written: deque[tuple[int, str, Store]] = deque()  # the records that this rank wrote: call, key, store
        self._late: dict[str, Callable[[], list[Any]]] = {}  # digests of the call before, by `peers`
        weakref.finalize(self, _say_ended, store, rank)

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
            raise RankError(f"rank {self._rank} came to {self._where}, but: {_NO_STORE} ({error})") from error
        self._met.add(kind)
        if kind != what:  # the call itself follows, under the same number; where planning fails, the call has failed
            self._counts[what] -= 1
        return result

    def watch_backward(self, outputs: Any) -> None:
        """See when a backward of this call begins, which gave `outputs`."""
        for x in leaves_of(outputs):
            if isinstance(x, Tensor) and x.requires_grad:
                self._ran_backward = False
                on_gradient(x, lambda _: self.backward_begins())

    def note_step(self, numbers: Sequence[float], what: str) -> None:
        """An optimizer makes a step with these hyperparameters; `what` names it in errors."""
        count, digest, _ = self._steps
        # Rounded, as hosts of other processors compute schedules with other last bits; a sum, as optimizers of single
        # parameters may step in any order.
        rounded = " ".join(f"{number:.6g}" for number in numbers)
        self._steps = count + 1, (digest + zlib.crc32(rounded.encode())) % 2**32, what

    def backward_begins(self) -> None:
        """A backward of this call begins on this rank."""
        if not self._ran_backward:
            self._ran_backward = True
            self._where = _BACKWARD + self._where

    @contextmanager
    def failing(self) -> Generator[None]:
        """Inside, others may have begun collectives; an error is left in the store for them to find."""
        try:
            with self._telling():
                yield
        except BaseException:
            self.is_torn = True
            self.close()  # after the error was told: this ends what other ranks wait for
            raise

    @contextmanager
    def _telling(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self._tell(error)
            raise

    def look(self) -> None:
        """Raise if another rank has failed in this call, or will never come to the collective that this one is in."""
        following = str(self._number + 1)
        self._look_for_failure(self._number)
        if self._number - 1 > self._told:  # this rank may have gone on before another one failed
            self._look_for_failure(self._number - 1)
        if self._where.startswith(_BACKWARD) and self._store.check([following]):
            rank, record = json.loads(self._store.get(following))
            if not record["backward"]:
                error = RankError(
                    f"rank {self._rank} is in {self._where}, but rank {rank} came to {record['call']} without one: "
                    "call backward() on every rank or on none"
                )
                self._tell(error, self._number + 1)
                self.broken = str(error)
                raise error

    def _look_for_failure(self, number: int) -> None:
        if self._told >= number or not self._store.check([f"{number}/failed"]):
            return
        rank, error = pickle.loads(self._store.get(f"{number}/failed"))
        found = type(error)(f"rank {rank} failed: {error}")
        self._store.set(f"spoke/{self._rank}", "")
        if number < self._number:
            self.broken = gone_on(self._rank, rank, str(error))
            self._tell(found)
        self._told, self._failure = self._number, str(found)
        raise found

    def lost(self, what: str, error: Exception) -> Exception:
        """The error to raise where the collective `what` ended in `error`, most often for want of another rank."""
        text = f"rank {self._rank} failed in {self._where}, {what}: {type(error).__name__}: {error}"
        try:
            self.look()
            self._tell(RankError(text))
            silent = _silent_ranks(self._store, self._rank, self._world_size)
        except AutoparError as known:
            return known
        except dist.DistError:
            silent = _NO_STORE
        self.broken = text
        return RankError(
            f"{text}\n{silent}. The step can't be finished: end all processes and start again from the last checkpoint."
        )

    def _call(self, kind: str, prepare: Callable[[], tuple[T, Named]], peers: str = "", *, waits: bool = False) -> T:
        self._number += 1
        number = self._counts[kind.removeprefix(PLANNING)]
        self._where = kind.replace("{}", str(number), 1)  # what follows may have braces of its own
        backward, self._ran_backward = self._ran_backward, True
        starts_anew = self._told == self._number - 1
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
            given = list(named)
            tensors = [(name, x) for name, x in given if isinstance(x, Tensor)]
            digests = {name: digest_of(x) for name, x in tensors}
            record = {
                "call": self._where, "backward": backward,
                "forms": [[name, _form_of(x)] for name, x in tensors],
                "plain": {name: _text_of(x) for name, x in given if not isinstance(x, Tensor)},
                "inputs": self._digests(digests, peers, waits=waits),
                "host": {name: int(digests[name]) for name, x in tensors if _is_compared_first(x)},
                "random": digest_generators(self._device) if self.compares_draws else 0,
                "steps": self._steps, "gradients": self.num_gradients, "failed": self._failure if starts_anew else "",
            }  # fmt: skip
            none: dict[str, Any] = {"forms": [], "plain": {}, "inputs": ["", {}], "host": {}}
            self._compare("", record | none if peers else record)
            if peers:
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
        key, record = f"{self._number}{peers}", json.dumps([self._rank, mine])
        for store in self._stores:
            rank, theirs = json.loads(store.compare_set(key, "", record))
            if rank != self._rank:
                self._compare_with(rank, theirs, mine, peers)
                break  # the first rank of this host compares with the others
            self._written.append((self._number, key, store))
        while self._written and self._written[0][0] <= self._number - _KEPT_CALLS:
            _, key, store = self._written.popleft()
            store.delete_key(key)

    def _compare_with(self, rank: int, theirs: dict[str, Any], mine: dict[str, Any], peers: str) -> None:
        if mine["random"] != theirs["random"] and not self._met:
            self._store.set("unlike", "")
        if bool(mine["failed"]) != bool(theirs["failed"]):
            ahead, behind = (self._rank, rank) if theirs["failed"] else (rank, self._rank)
            self.broken = gone_on(ahead, behind, mine["failed"] or theirs["failed"])
            raise RankError(self.broken)
        error = difference(self._rank, mine, rank, theirs, has_peers=bool(peers), is_in_step=self.is_in_step)
        if error is not None:
            raise error

    def _digests(self, digests: Mapping[str, Tensor], peers: str, *, waits: bool) -> list[Any]:
        """``[the call that they are of, {input: digest}]``.

        On an accelerator, but in the first call, they are of the call before: nothing is waited for.
        """
        call, read = self._where, start_reading(list(digests.values()), self._device)

        def digests_of_call() -> list[Any]:
            return [call, dict(zip(digests, read(), strict=True))]

        if self._device.type == "cpu" or waits:
            self._late.pop(peers, None)  # of a call that may have failed on some ranks before they had its inputs
            return digests_of_call()
        before, self._late[peers] = self._late.get(peers), digests_of_call
        return before() if before else ["", {}]

    @contextmanager
    def _waiting_for_all(self) -> Generator[None]:
        """Inside is what may fail on one rank; after it, raise on all if it did."""
        here = f"{self._number}/here"
        try:
            with self._telling():
                yield
        finally:
            if self.is_torn:
                self._store.add(f"{here}/torn", 1)
            self._store.set(f"{here}/{self._rank}", "")
            self._store.add(here, 1)
        started_s, pause_s, warn_s = time.monotonic(), 1e-3, _WARN_S
        while self._store.add(here, 0) < self._world_size:
            self.look()
            waited_s = time.monotonic() - started_s
            if waited_s > warn_s or self._store.check(["ended"]):
                self._complain(here, waited_s)
                warn_s = self._timeout_s
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(0.1, _POLL_PER_RANK_S * self._world_size))
        self.look()
        if not self._met:
            self.is_in_step = self.compares_draws and not self._store.check(["unlike"])

    def _complain(self, here: str, waited_s: float) -> None:
        """Name the ranks that have not come to this call; raise if they never will."""
        missing = [rank for rank in range(self._world_size) if not self._store.check([f"{here}/{rank}"])]
        ended = [rank for rank in missing if self._store.check([f"ended/{rank}"])]
        if ended or (missing and waited_s > self._timeout_s):
            how = f"ranks {ended} ended, or let go of their model" if ended else f"ranks {missing} did not come to it"
            raise RankError(
                f"rank {self._rank} waited {waited_s:.0f} s in {self._where}, but {how}: all ranks must make the same "
                "calls in the same order, also to evaluate"
            )
        if missing and waited_s > _WARN_S:
            _LOGGER.warning("rank %d waits in %s for ranks %s", self._rank, self._where, missing)

    def _tell(self, error: BaseException, *numbers: int) -> None:
        """Leave `error` for other ranks in this call, and in these."""
        if self._told == self._number:
            return
        self._told, self._failure = self._number, f"{type(error).__name__}: {error}"
        with suppress(dist.DistError):
            self._store.set(f"spoke/{self._rank}", "")
            for number in (self._number, *numbers):
                self._store.set(f"{number}/failed", pickle.dumps((self._rank, portable(error))))
            self._store.check([f"spoke/{self._rank}"])  # a set does not wait for the server; others look at once


def _silent_ranks(store: Store, own: int, world_size: int) -> str:
    """Which ranks have no error to tell, as far as is known a little later."""
    others = [rank for rank in range(world_size) if rank != own]
    until_s = time.monotonic() + _LAST_WORDS_S
    while not store.check([f"spoke/{rank}" for rank in others]) and time.monotonic() < until_s:
        time.sleep(0.05)
    silent = [rank for rank in others if not store.check([f"spoke/{rank}"])]
    if not silent:
        return "All other ranks failed, too: look for their messages"
    return f"No word from ranks {silent}: one of them ended or hangs, most likely; look for its message"


def _form_of(x: Tensor) -> str:
    """Shape, dtype, and whether a gradient is wanted, which backward may have to communicate."""
    wants_gradient = x.requires_grad and torch.is_grad_enabled()
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}{WITH_GRADIENT if wants_gradient else ''}"


def _text_of(x: float | str) -> str:
    """`x` as text that differs where `x` does, and is short."""
    text = repr(x)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"


def _is_compared_first(x: Tensor) -> bool:
    """Whether it is few integers in the host's memory: they may decide what runs, and are compared before that does."""
    return x.device.type == "cpu" and x.numel() <= _FEW and not x.is_floating_point()


def _say_ended(store: Store, rank: int) -> None:
    """Whoever waits for `rank` can stop."""
    with suppress(Exception):
        if store_answers(store):
            store.set(f"ended/{rank}", "")
            store.set("ended", "")
