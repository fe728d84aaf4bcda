"""Ranks whose calls differ: each learns of it, with ranks, call and what differs named.  Here ranks are threads."""

from __future__ import annotations

import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, InputShapeError, MeshError, RankError
from autopar.lower.communication import arrivals, call_failures, call_records
from autopar.lower.communication.call_consensus import CallConsensus
from autopar.lower.communication.torch_groups import open_host_store

STEP = "training step {}"
drawn = threading.local()  # where the generator of a rank stands


@pytest.fixture(autouse=True)
def generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_records, "digest_generators", lambda _: getattr(drawn, "numbers", 0))


class Ranks:
    """Some ranks on one store, run in turn or at once."""

    def __init__(self, count: int = 2, **arguments: Any) -> None:
        self.store = dist.HashStore()
        arguments = {"device": torch.device("cpu"), "timeout_s": 20.0} | arguments
        self.calls = [CallConsensus(self.store, rank, count, **arguments) for rank in range(count)]

    def at_once(self, act: Callable[[int, CallConsensus], Any]) -> list[Any]:
        """What `act` returns on each rank, or the error that it raises."""
        found: list[Any] = [None] * len(self.calls)

        def run(rank: int) -> None:
            try:
                found[rank] = act(rank, self.calls[rank])
            except Exception as error:  # noqa: BLE001  (it is what a test looks at)
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


def step(calls: CallConsensus, *inputs: Tensor, kind: str = STEP) -> str:
    return calls.enter(kind, lambda: ("ran", [("ids", inputs[0]), *(("targets", x) for x in inputs[1:])]))


def texts(found: Sequence[Any], kind: type[AutoparError]) -> list[str]:
    assert [type(each) for each in found] == [kind] * len(found), found
    return [str(each) for each in found]


X = torch.arange(6)


def begun(count: int = 2, **arguments: Any) -> Ranks:
    """Ranks that have run one step alike."""
    ranks = Ranks(count, **arguments)
    assert ranks.at_once(lambda _, calls: step(calls, X)) == ["ran"] * count
    return ranks


def test_ranks_that_do_the_same_wait_only_in_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_records, "_KEPT_CALLS", 3)
    ranks = begun()
    keys = ranks.store.num_keys()
    for number in range(20):
        for calls in ranks.calls:  # one after the other: waiting would never end
            assert step(calls, X + number) == "ran"
    assert ranks.store.num_keys() - keys <= 4


class CountedStore:
    """A store that counts exchanges."""

    def __init__(self) -> None:
        self.store, self.exchanges = dist.HashStore(), 0

    def compare_set(self, *arguments: str) -> bytes:
        self.exchanges += 1
        return self.store.compare_set(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_ranks_of_a_host_compare_in_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_records, "_KEPT_CALLS", 3)
    world, hosts = CountedStore(), [CountedStore(), CountedStore()]
    ranks = Ranks(0)
    ranks.calls = [
        CallConsensus(world, rank, 6, torch.device("cpu"), 20.0, host_store=hosts[rank // 3]) for rank in range(6)
    ]
    assert ranks.at_once(lambda _, calls: step(calls, X)) == ["ran"] * 6
    begun = [store.exchanges for store in (world, *hosts)]
    keys = [store.num_keys() for store in (world, *hosts)]
    for number in range(10):
        for calls in ranks.calls:
            assert step(calls, X + number) == "ran"
    assert [store.exchanges - before for store, before in zip((world, *hosts), begun, strict=True)] == [20, 30, 30]
    assert all(store.num_keys() - before <= 4 for store, before in zip((world, *hosts), keys, strict=True))
    for rank in (0, 1, 2, 3):
        if rank == 3:  # the first of the other host
            with pytest.raises(MeshError, match="'ids' of rank 3 differs from that of rank 0"):
                step(ranks.calls[rank], X + 1)
        else:
            step(ranks.calls[rank], X)
    with pytest.raises(MeshError, match=r"^rank 3 failed"):
        ranks.calls[1].look()


def test_processes_of_a_host_find_its_store() -> None:
    shared = dist.HashStore()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(open_host_store(shared))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len({store.port for store in found}) == 1
    found[0].set("word", "said")
    assert [store.get("word") for store in found] == [b"said"] * 3


def test_a_host_whose_store_cannot_be_reached_has_none() -> None:
    shared = dist.HashStore()
    kept = open_host_store(shared)
    (port,) = (key for key in (f"host/{socket.gethostname()}/{uuid.getnode()}/port",) if shared.check([key]))
    shared.set(port, "none")
    assert open_host_store(shared) is None
    assert kept is not None


def test_another_batch_in_a_later_step() -> None:
    ranks = begun()
    assert step(ranks.calls[0], X, X + 1) == "ran"
    with pytest.raises(MeshError, match=r"different batches in training step 2: 'targets' of rank 1 differs.* rank 0"):
        step(ranks.calls[1], X, X + 2)
    with pytest.raises(MeshError, match=r"^rank 1 failed: ranks were given different batches in training step 2"):
        ranks.calls[0].look()


def test_a_permuted_batch() -> None:
    ranks = begun()
    step(ranks.calls[0], X)
    with pytest.raises(MeshError, match="'ids' of rank 1"):
        step(ranks.calls[1], X.flip(0))


def test_another_batch_in_the_first_call_is_an_error_of_all_and_the_next_call_works() -> None:
    ranks = Ranks(3)
    said = texts(ranks.at_once(lambda rank, calls: step(calls, X + (rank == 1))), MeshError)
    assert all("different batches in training step 1" in text for text in said)
    assert ranks.at_once(lambda _, calls: step(calls, X)) == ["ran"] * 3


def test_bad_input_on_one_rank() -> None:
    def refuse(rank: int, calls: CallConsensus) -> Any:
        def prepare() -> Any:
            if rank == 1:
                raise InputShapeError("of another shape")
            return "ran", [("ids", X)]

        return calls.enter(STEP, prepare)

    ranks = Ranks()
    assert texts(ranks.at_once(refuse), InputShapeError) == ["rank 1 failed: of another shape", "of another shape"]
    assert ranks.at_once(lambda _, calls: step(calls, X)) == ["ran", "ran"]
    assert refuse(0, ranks.calls[0]) == "ran"
    with pytest.raises(InputShapeError):
        refuse(1, ranks.calls[1])
    with pytest.raises(InputShapeError, match="rank 1 failed: of another shape"):
        ranks.calls[0].look()


def test_a_rank_that_evaluates_alone() -> None:
    for times in (0, 1):  # before any evaluation, and after one of all
        ranks = begun()
        for _ in range(times):
            ranks.at_once(lambda _, calls: step(calls, X, kind="evaluation {}"))
        found = ranks.at_once(lambda rank, calls: step(calls, X, kind=STEP if rank else "evaluation {}"))
        errors = [each for each in found if each != "ran"]
        assert all(isinstance(each, RankError) for each in errors)
        assert "training step 2" in str(errors[0])
        assert f"evaluation {1 + times}" in str(errors[0])
        if found[0] == "ran":
            with pytest.raises(RankError, match="rank 1 came to training step 2 when rank 0 came to evaluation"):
                ranks.calls[0].look()


def test_one_random_number_more() -> None:
    ranks = begun()

    def draw(rank: int, calls: CallConsensus) -> str:
        drawn.numbers = rank
        return step(calls, X)

    found = [each for each in ranks.at_once(draw) if each != "ran"]
    (text,) = texts(found, RankError)
    assert "generators of ranks" in text
    assert "out of step in training step 2" in text
    assert "fork_rng" in text


def test_ranks_may_be_seeded_differently() -> None:
    ranks = Ranks()

    def draw(rank: int, calls: CallConsensus) -> str:
        drawn.numbers = 10 * rank
        return step(calls, X)

    for _ in range(3):
        assert ranks.at_once(draw) == ["ran", "ran"]
    assert not any(calls.is_in_step for calls in ranks.calls)
    assert all(calls.is_in_step for calls in begun().calls)


def look_for_a_while(calls: CallConsensus) -> None:
    """On a busy machine the other rank may not have come to the store yet."""
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        calls.look()


def test_a_backward_that_one_rank_skips() -> None:
    ranks = begun()
    losses = [torch.zeros((), requires_grad=True) * 2 for _ in range(2)]
    for calls, loss in zip(ranks.calls, losses, strict=True):
        calls.watch_backward({"loss": loss})
    losses[0].backward()
    ranks.calls[0].look()  # the other may be slow
    ahead = threading.Thread(target=ranks.at_once, args=(lambda rank, calls: rank and step(calls, X),))
    ahead.start()
    time.sleep(0.2)
    assert ahead.is_alive(), "a rank that ran no backward waits for the others, which may be in one"
    with pytest.raises(
        RankError, match="rank 0 is in the backward of training step 1, but rank 1 came to training step 2"
    ):
        look_for_a_while(ranks.calls[0])
    ahead.join(10)
    assert not ahead.is_alive()


def test_a_backward_that_no_rank_runs() -> None:
    ranks = begun()
    for _ in range(3):
        for calls in ranks.calls:
            calls.watch_backward(torch.zeros((), requires_grad=True) * 2)
        assert ranks.at_once(lambda _, calls: step(calls, X)) == ["ran"] * 2


def test_after_a_collective_that_was_left_nothing_runs() -> None:
    ranks = begun()
    step(ranks.calls[0], X)
    with pytest.raises(MeshError):
        step(ranks.calls[1], X + 1)
    with pytest.raises(MeshError, match="rank 1 failed"):
        ranks.calls[0].look()
    ranks.calls[0].broken = "a connection was lost"
    said = texts(ranks.at_once(lambda _, calls: step(calls, X)), RankError)
    assert all("rank 0 can't go on after an earlier call" in text and "a connection was lost" in text for text in said)


def fail_in_the_middle(calls: CallConsensus, error: Exception) -> None:
    with calls.failing():
        raise error


def test_all_ranks_begin_anew_after_a_failure_that_all_know_of() -> None:
    ranks = begun()
    done: list[str] = []
    for rank, calls in enumerate(ranks.calls):
        calls.close = partial(done.append, f"closed {rank}")
        calls.renew = partial(done.append, f"renewed {rank}")
        step(calls, X)
    with pytest.raises(torch.OutOfMemoryError):
        fail_in_the_middle(ranks.calls[1], torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"))
    with pytest.raises(torch.OutOfMemoryError, match=r"^rank 1 failed: CUDA out of memory\."):
        ranks.calls[0].look()
    assert ranks.at_once(lambda _, calls: step(calls, X[:3])) == ["ran", "ran"]  # another batch, as after a retry
    assert sorted(done) == ["closed 1", "renewed 0", "renewed 1"]
    for calls in ranks.calls:  # and nobody waits
        assert step(calls, X) == "ran"


def test_nothing_is_opened_anew_where_nothing_had_begun() -> None:
    ranks = Ranks()
    for calls in ranks.calls:
        calls.renew = pytest.fail
    texts(ranks.at_once(lambda rank, calls: step(calls, X + rank)), MeshError)
    assert ranks.at_once(lambda _, calls: step(calls, X)) == ["ran"] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_goes_on_after_another_failed(first: int) -> None:
    """It may have updated its parameters."""
    ranks = begun()
    for calls in ranks.calls:
        step(calls, X)
    with pytest.raises(ValueError, match="bad"):
        fail_in_the_middle(ranks.calls[1], ValueError("bad"))

    def go_on(rank: int, calls: CallConsensus) -> str:
        time.sleep(0.0 if rank == first else 0.3)
        said = step(calls, X)
        look_for_a_while(calls)
        return said

    found = ranks.at_once(go_on)
    assert all(isinstance(each, AutoparError) and "rank 1 failed" in str(each) for each in found), found
    said = texts(ranks.at_once(lambda _, calls: step(calls, X)), RankError)
    assert all("can't go on after an earlier call" in text for text in said)


def test_a_failure_is_found_one_call_later() -> None:
    """Where the rank that failed makes another model, and never comes back to this one."""
    ranks = begun()
    for calls in ranks.calls:
        step(calls, X)
    with pytest.raises(torch.OutOfMemoryError):
        fail_in_the_middle(ranks.calls[1], torch.OutOfMemoryError("CUDA out of memory."))
    assert step(ranks.calls[0], X) == "ran"
    with pytest.raises(torch.OutOfMemoryError, match=r"^rank 1 failed: CUDA out of memory\."):
        ranks.calls[0].look()


def test_digests_of_an_accelerator_are_compared_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def start_reading(digests: Sequence[Tensor], _: torch.device) -> Callable[[], list[int]]:
        def values() -> list[int]:
            read.append(1)
            return [int(each) for each in digests]

        return values

    monkeypatch.setattr(call_records, "start_reading", start_reading)
    ranks = begun(device=torch.device("cuda"))
    read.clear()
    for calls, more in zip(ranks.calls, (0, 1), strict=True):
        assert step(calls, X.float() + more) == "ran"  # few integers in the host's memory are compared at once
    assert not read
    step(ranks.calls[0], X.float())
    with pytest.raises(MeshError, match="different batches in training step 2: 'ids' of rank 1"):
        step(ranks.calls[1], X.float())


def test_a_rank_that_ends_while_another_waits_for_it() -> None:
    ranks = begun()

    def leave(rank: int, calls: CallConsensus) -> str:
        if rank == 0:
            return step(calls, X, kind="evaluation {}")
        time.sleep(0.2)
        ranks.calls.pop()
        return "left"

    found = ranks.at_once(leave)
    assert found[1] == "left"
    assert re_match(r"rank 0 waited \d s in evaluation 1, but ranks \[1\] ended", found[0])


def test_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(arrivals, "_WARN_S", 0.1)
    ranks = Ranks(timeout_s=0.4)
    with caplog.at_level(logging.WARNING), pytest.raises(RankError, match=r"training step 1, but ranks \[1\] did not"):
        step(ranks.calls[0], X)
    assert "rank 0 waits in training step 1 for ranks [1]" in caplog.text


def test_a_lost_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_failures, "_LAST_WORDS_S", 1.0)
    ranks = begun(4)
    lost = RuntimeError("Connection closed by peer")

    def fail(rank: int, calls: CallConsensus) -> Any:
        if rank != 2:
            raise calls.lost("all_reduce with ranks [0, 1]", lost)

    found = ranks.at_once(fail)
    (first, *others) = [str(each) for each in found if isinstance(each, RankError) and "failed in" in str(each)]
    assert "failed in training step 1, all_reduce with ranks [0, 1]: RuntimeError: Connection closed by peer" in first
    assert any("No word from ranks [2]" in text for text in (first, *others)), found
    assert found[2] is None


def re_match(pattern: str, error: Any) -> bool:
    assert isinstance(error, RankError)
    assert error.args
    import re

    return bool(re.search(pattern, str(error)))


def rows_of(calls: CallConsensus, data_rank: int, x: Tensor) -> str:
    return calls.enter("the inputs of training step {}", lambda: ("ran", [("ids", x)]), peers=f"/{data_rank}")


def test_rows_are_compared_among_the_ranks_that_share_them() -> None:
    ranks = Ranks(4)
    for number in range(3):
        found = ranks.at_once(lambda rank, calls: rows_of(calls, rank // 2, X[rank // 2 :] + number))  # noqa: B023
        assert found == ["ran"] * 4
        assert ranks.at_once(lambda _, calls: step(calls, X)) == ["ran"] * 4  # what all ranks share, in between
    (text,) = {
        str(x) for x in ranks.at_once(lambda rank, calls: rows_of(calls, rank // 2, X + (rank == 1))) if x != "ran"
    }
    assert "'ids' of rank" in text
    assert "in the inputs of training step 4" in text
    assert "must pass the same rows: sample with num_replicas=model.data_parallel_size and rank=model.data_rank" in text


def test_ranks_with_other_rows_come_to_the_same_call() -> None:
    ranks = Ranks(2)
    assert ranks.at_once(lambda rank, calls: rows_of(calls, rank, X + rank)) == ["ran"] * 2
    found = ranks.at_once(lambda rank, calls: rows_of(calls, rank, X) if rank else step(calls, X))
    assert any("the inputs of training step 2" in str(x) and "training step 1" in str(x) for x in found)


def test_ranks_that_draw_for_rows_of_their_own_may_draw_differently() -> None:
    ranks = Ranks(2)
    for calls in ranks.calls:
        calls.records.compares_draws = False

    def act(rank: int, calls: CallConsensus) -> str:
        drawn.numbers = rank
        return step(calls, X)

    assert ranks.at_once(act) == ["ran"] * 2
    assert ranks.at_once(act) == ["ran"] * 2
    assert not any(calls.is_in_step for calls in ranks.calls)


def test_what_a_call_is_named_by_may_have_braces() -> None:
    """Dicts among the attributes of a model are written into it."""
    ranks = begun()
    kind = STEP + " with weights = {'loss': 0.5}, options = {}"
    assert ranks.at_once(lambda _, calls: step(calls, X, kind=kind)) == ["ran"] * 2
    found = ranks.at_once(lambda rank, calls: step(calls, X + rank, kind=kind))
    assert any("with weights = {'loss': 0.5}, options = {}" in str(each) for each in found)
