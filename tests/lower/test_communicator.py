"""The collectives of both communicators against their definition on the list of all ranks' tensors."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from autopar.errors import MeshError
from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.simulated_ranks import CollectiveMismatchError, simulate
from autopar.placement import Axis, mesh_axes
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.bool]
PAIR, INNER, OUTER = Axis(4, 1), Axis(2, 1), Axis(2, 2)


def brought(rank: int, dtype: torch.dtype, rows: int = 4) -> torch.Tensor:
    """What `rank` brings: whole numbers that 16 bits hold, and not contiguous."""
    numbers = torch.arange(rows * 8).view(8, rows).t() * (rank + 1) % 7
    return numbers.to(dtype)


def run_all_kinds(c: Communicator, axis: Axis, dtype: torch.dtype, rows: int = 4) -> dict[str, torch.Tensor]:
    x = brought(c.rank, dtype, rows)
    before = x.clone()
    results = {
        "all_gather 0": c.all_gather(x, axis, 0),
        "all_gather 1": c.all_gather(x, axis, -1),
        "reduce_scatter 0": c.reduce_scatter(x, axis, 0),
        "reduce_scatter 1": c.reduce_scatter(x, axis, 1),
        "all_reduce sum": c.all_reduce(x, axis),
        "all_reduce max": c.all_reduce(x, axis, "max"),
        "all_to_all 0 1": c.all_to_all(x, axis, 0, 1),
        "all_to_all 1 0": c.all_to_all(x, axis, 1, 0),
        "broadcast": c.broadcast(x, axis, axis.size - 1),
    }
    assert torch.equal(x, before), "a collective wrote to its operand"
    assert all(result.is_contiguous() for result in results.values())
    return results


def expect_all_kinds(rank: int, axis: Axis, dtype: torch.dtype, rows: int = 4) -> dict[str, torch.Tensor]:
    group = [brought(member, dtype, rows) for member in axis.group(rank)]
    own, size = axis.coordinate(rank), axis.size
    total = torch.stack(group).to(torch.float64).sum(0)
    total = total.bool() if dtype is torch.bool else total.to(dtype)
    return {
        "all_gather 0": torch.cat(group, 0),
        "all_gather 1": torch.cat(group, 1),
        "reduce_scatter 0": total.chunk(size, 0)[own],
        "reduce_scatter 1": total.chunk(size, 1)[own],
        "all_reduce sum": total,
        "all_reduce max": torch.stack(group).amax(0),
        "all_to_all 0 1": torch.cat([x.chunk(size, 0)[own] for x in group], 1),
        "all_to_all 1 0": torch.cat([x.chunk(size, 1)[own] for x in group], 0),
        "broadcast": group[-1],
    }


def check_all_kinds(rank: int, results: dict[str, torch.Tensor], axis: Axis, dtype: torch.dtype, rows: int = 4) -> None:
    for kind, expected in expect_all_kinds(rank, axis, dtype, rows).items():
        assert results[kind].dtype is dtype
        assert torch.equal(results[kind], expected), f"{kind} of {dtype} on {axis}, rank {rank}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [PAIR, INNER, OUTER], ids=["world", "inner", "outer"])
def test_simulated_collectives_follow_their_definition(axis: Axis, dtype: torch.dtype):
    for rank, results in enumerate(simulate(4, lambda c: run_all_kinds(c, axis, dtype))):
        check_all_kinds(rank, results, axis, dtype)


def test_a_recording_holds_kind_axis_and_bytes_of_the_larger_side():
    def run(c: Communicator) -> tuple[list[Collective], list[Collective]]:
        x = torch.zeros(4, 2)  # 32 bytes
        c.all_reduce(x, OUTER)
        with c.recording() as outer:
            c.all_gather(x, PAIR, 0)
            with c.recording() as inner:
                c.reduce_scatter(x, INNER, 0)
                c.all_to_all(x, Axis(1, 4), 0, 1)
            c.start_all_to_all(x, OUTER, 0, 1).wait()
            c.all_reduce(x, OUTER, "max")
            c.broadcast(x, INNER)
        c.all_reduce(x, OUTER)
        return outer, inner

    for outer, inner in simulate(4, run):
        assert outer == [
            Collective("all_gather", PAIR, 128),
            Collective("reduce_scatter", INNER, 32),
            Collective("all_to_all", OUTER, 32),
            Collective("all_reduce", OUTER, 32),
            Collective("broadcast", INNER, 32),
        ]
        assert inner == [Collective("reduce_scatter", INNER, 32)]


def test_an_operand_may_be_overwritten_while_others_still_read():
    def run(c: Communicator) -> torch.Tensor:
        x = torch.full((1000,), float(c.rank))
        total = c.all_gather(x, PAIR, 0)
        x.fill_(-1)
        return total

    for result in simulate(4, run):
        assert torch.equal(result, torch.arange(4.0).repeat_interleave(1000))


def test_different_shapes_in_one_meeting_name_both_sides():
    either_order = r"float32 \[2\].*float32 \[3\]|float32 \[3\].*float32 \[2\]"
    with pytest.raises(CollectiveMismatchError, match=either_order):
        simulate(2, lambda c: c.all_reduce(torch.ones(2 + c.rank), INNER))


def test_different_kinds_in_one_meeting_name_both_sides():
    def run(c: Communicator) -> torch.Tensor:
        x = torch.ones(2)
        return c.all_reduce(x, INNER) if c.rank else c.all_gather(x, INNER, 0)

    with pytest.raises(CollectiveMismatchError, match=r"(?s)all_reduce.*all_gather|all_gather.*all_reduce"):
        simulate(2, run)


def test_different_axes_are_found_without_waiting_for_the_timeout():
    # 0 meets 1 and then wants 2; 1 to 3 never meet 0's other partner
    def run(c: Communicator) -> torch.Tensor:
        return c.all_reduce(torch.ones(2), OUTER if c.rank == 0 else INNER)

    with pytest.raises(CollectiveMismatchError, match="rank 0 waits in all_reduce"):
        simulate(4, run, timeout_s=30)


def test_a_rank_that_returns_early_is_found():
    with pytest.raises(CollectiveMismatchError, match="rank 1 has returned"):
        simulate(2, lambda c: None if c.rank else c.all_reduce(torch.ones(2), INNER), timeout_s=30)


def test_an_exception_aborts_the_others_and_names_its_rank():
    def run(c: Communicator) -> None:
        if c.rank == 2:
            raise ZeroDivisionError("by design")
        c.all_reduce(torch.ones(2), PAIR)

    with pytest.raises(ZeroDivisionError, match="by design") as caught:
        simulate(4, run, timeout_s=30)
    assert caught.value.__notes__ == ["raised on simulated rank 2 of 4"]


def test_a_simulation_that_takes_too_long_says_where_each_rank_is():
    stop = threading.Event()

    def run(c: Communicator) -> None:
        if c.rank:
            c.all_reduce(torch.ones(2), INNER)
        else:
            stop.wait(20)

    with pytest.raises(TimeoutError, match="rank 0 is computing; rank 1 waits in all_reduce"):
        simulate(2, run, timeout_s=2)  # in which rank 1 comes there
    stop.set()


def test_a_simulation_runs_on_the_threads_of_the_one_before_unless_these_are_busy():
    released, seen = threading.Event(), []

    def stay(communicator: Communicator) -> None:
        seen.append(threading.get_ident())
        released.wait()

    first, second = (simulate(2, lambda _: threading.get_ident()) for _ in range(2))
    assert first == second
    with pytest.raises(TimeoutError):
        simulate(2, stay, timeout_s=0.01)
    assert not set(simulate(2, lambda _: threading.get_ident())) & set(seen)
    released.set()


def messages(rank: int) -> list[torch.Tensor]:
    """What `rank` sends to everybody: each dtype, a large one, a scalar, an empty one."""
    one_of_each = [brought(rank, dtype) for dtype in DTYPES]
    return [*one_of_each, brought(rank, torch.float32, 1 << 16), torch.tensor(rank), torch.ones(0, 3)]


def exchange(c: Communicator, axis: Axis) -> None:
    own = axis.coordinate(c.rank)
    others = [coordinate for coordinate in range(axis.size) if coordinate != own]
    with c.recording() as record:
        sent = [c.start_send(x, axis, to) for x in messages(c.rank) for to in others]
        received = {
            source: [c.start_receive(x.shape, x.dtype, axis, source) for x in messages(c.rank)] for source in others
        }
    assert record == [Collective("send", axis, x.nbytes) for x in messages(c.rank) for _ in others]
    for source in reversed(others):
        expected = messages(axis.group(c.rank)[source])
        for handle, x in reversed(list(zip(received[source], expected, strict=True))):  # in any order
            got = handle.wait()
            assert got.dtype is x.dtype
            assert got.is_contiguous()
            assert torch.equal(got, x)
    for handle in sent:
        handle.wait()


@pytest.mark.parametrize("axis", [PAIR, INNER, OUTER], ids=["world", "inner", "outer"])
def test_simulated_messages_arrive_in_order(axis: Axis):
    simulate(4, lambda c: exchange(c, axis))


def rows_between(source: int, to: int, dtype: torch.dtype) -> torch.Tensor:
    """What rank `source` gives to rank `to`: 0 to 2 rows, that name both."""
    return torch.full(((2 * source + to) % 3, 2), 10 * source + to, dtype=dtype)


def exchange_rows(c: Communicator, axis: Axis, dtype: torch.dtype) -> None:
    ranks = axis.group(c.rank)
    sent, wanted = [rows_between(c.rank, to, dtype) for to in ranks], [rows_between(s, c.rank, dtype) for s in ranks]
    with c.recording() as record:
        handle = c.start_exchange_rows(torch.cat(sent), axis, list(map(len, sent)), list(map(len, wanted)))
    got = handle.wait()
    assert got.dtype is dtype
    assert torch.equal(got, torch.cat(wanted))
    assert record[0] == Collective("all_to_all", axis, torch.cat(sent).nbytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("axis", [PAIR, INNER, OUTER], ids=["world", "inner", "outer"])
def test_unequal_numbers_of_rows_are_exchanged(axis: Axis, dtype: torch.dtype):
    simulate(4, lambda c: exchange_rows(c, axis, dtype))


def test_a_sender_does_not_wait_and_may_overwrite_what_it_sent_and_waited_for():
    def run(c: Communicator) -> list[float]:
        if c.rank == 0:
            x = torch.zeros(2)
            for number in range(3):
                c.start_send(x, INNER, 1).wait()
                x.fill_(number + 1)
            return []
        return [c.start_receive((2,), torch.float32, INNER, 0).wait()[1].item() for _ in range(3)]

    assert simulate(2, run) == [[], [0.0, 1.0, 2.0]]


def test_messages_along_different_axes_do_not_mix():
    def run(c: Communicator) -> tuple[float, float]:
        if c.rank == 0:
            c.start_send(torch.tensor(1.0), PAIR, 1)
            c.start_send(torch.tensor(2.0), INNER, 1)
            return 2.0, 1.0
        if c.rank > 1:
            return 2.0, 1.0
        inner, pair = (c.start_receive((), torch.float32, axis, 0).wait().item() for axis in (INNER, PAIR))
        return inner, pair

    assert simulate(4, run) == [(2.0, 1.0)] * 4


def test_a_message_that_nobody_sends_is_found():
    def run(c: Communicator) -> None:
        if c.rank == 0:
            c.start_receive((2,), torch.int64, INNER, 1).wait()
        elif c.rank == 1:
            c.all_reduce(torch.ones(2), Axis(2, 1))

    with pytest.raises(CollectiveMismatchError, match=r"rank 0 waits in a receive of int64 \[2\] .* from rank 1"):
        simulate(2, run, timeout_s=30)


def test_receivers_in_a_ring_that_nobody_starts_are_found():
    def run(c: Communicator) -> None:
        before, after = (c.rank - 1) % 4, (c.rank + 1) % 4
        x = c.start_receive((2,), torch.float32, PAIR, before).wait()
        c.start_send(x, PAIR, after)

    with pytest.raises(CollectiveMismatchError, match=r"rank 3 waits in a receive .* from rank 2"):
        simulate(4, run, timeout_s=30)


def test_a_message_that_nobody_receives_is_found():
    def run(c: Communicator) -> None:
        if c.rank == 0:
            c.start_send(torch.ones(2), INNER, 1)

    with pytest.raises(CollectiveMismatchError, match=r"rank 0 sends float32 \[2\] .*which rank 1 never receives"):
        simulate(2, run, timeout_s=30)


@pytest.mark.parametrize("sent", [torch.ones(3), torch.ones(2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_message_that_differs_from_what_is_wanted_names_both(sent: torch.Tensor):
    def run(c: Communicator) -> None:
        if c.rank == 0:
            c.start_send(sent, INNER, 1)
        else:
            c.start_receive((2,), torch.float32, INNER, 0).wait()

    with pytest.raises(CollectiveMismatchError, match=r"rank 0 sends .*, rank 1 receives float32 \[2\]"):
        simulate(2, run, timeout_s=30)


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_there_are_no_messages_to_oneself_or_outside_the_axis(peer: int):
    with pytest.raises(ValueError, match=r"rank 0, coordinate 0 of .*, can't exchange messages"):
        simulate(2, lambda c: None if c.rank else c.start_send(torch.ones(2), INNER, peer))


def test_simulated_ranks_inherit_the_grad_mode():
    with torch.no_grad():
        assert simulate(2, lambda c: torch.is_grad_enabled()) == [False, False]
    assert simulate(2, lambda c: torch.is_grad_enabled()) == [True, True]


def test_there_must_be_a_process_group():
    with pytest.raises(MeshError, match="torchrun"):
        ProcessGroupCommunicator()


def gloo_run(ranks: tuple[int, ...]) -> int:
    c = ProcessGroupCommunicator(ranks)
    axes = [PAIR, INNER, OUTER]
    c.prepare(axes)
    for axis in axes:
        for dtype in DTYPES:
            check_all_kinds(c.rank, run_all_kinds(c, axis, dtype), axis, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int16):  # beyond what goes directly
            check_all_kinds(c.rank, run_all_kinds(c, axis, dtype, 1 << 16), axis, dtype, 1 << 16)
        exchange(c, axis)
        exchange_rows(c, axis, torch.bfloat16)
        exchange_rows(c, axis, torch.float64)
    overlapping = [c.start_all_reduce(torch.full((3,), float(i)), axis) for i, axis in enumerate(axes)]
    assert [handle.wait()[0].item() for handle in overlapping] == [0, 2, 4]
    check_that_buffers_go(c)
    return c.rank


def check_that_buffers_go(c: Communicator) -> None:
    """What was received goes with its last reader: memory for a whole step's collectives would be too much."""
    gc.disable()
    try:
        results = run_all_kinds(c, PAIR, torch.float32, 1 << 16)
        there = [weakref.ref(result) for result in results.values()]
        del results
        until_s = time.monotonic() + 5  # gloo's thread lets go of a tensor a moment after it says that it is done
        while any(kind() is not None for kind in there) and time.monotonic() < until_s:
            time.sleep(0.01)
        assert [kind() for kind in there] == [None] * len(there)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=["in order", "permuted"])
def test_gloo_collectives_follow_their_definition(ranks: tuple[int, ...]):
    assert run_ranks(gloo_run, 4, ranks) == [ranks.index(process) for process in range(4)]


def gloo_message_without_handle() -> float:
    c = ProcessGroupCommunicator()
    inner = Axis(2, 1)
    if c.rank == 0:
        c.start_send(torch.full((1 << 20,), 3.0), inner, 1)  # nobody keeps the handle
        c.start_receive((), torch.float32, inner, 1).wait()
        return 3.0
    x = c.start_receive((1 << 20,), torch.float32, inner, 0).wait()
    c.start_send(torch.tensor(0.0), inner, 0).wait()
    return x.mean().item()


@pytest.mark.slow
def test_gloo_sends_also_when_nobody_keeps_the_handle():
    assert run_ranks(gloo_message_without_handle, 2) == [3.0, 3.0]


def gloo_subset() -> float | str:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        with pytest.raises(MeshError, match="process 0 is not in the mesh"):
            ProcessGroupCommunicator((3, 1))
        return "outside"
    if dist.get_rank() == 2:
        return "outside"
    c = ProcessGroupCommunicator((3, 1))
    return c.all_gather(torch.tensor([float(dist.get_rank())]), *mesh_axes((2,)), 0).tolist()


@pytest.mark.slow
def test_gloo_on_some_of_the_processes():
    assert run_ranks(gloo_subset, 4) == ["outside", [3.0, 1.0], "outside", [3.0, 1.0]]


def gloo_sum_in_float32(num_elements: int) -> float:
    c = ProcessGroupCommunicator()
    terms = torch.full((num_elements,), [256.0, 1.0, 1.0, 0.0][c.rank], dtype=torch.bfloat16)
    return c.all_reduce(terms, PAIR)[-1].item()


@pytest.mark.slow
@pytest.mark.parametrize("num_elements", [3, (1 << 20) + 1])
def test_gloo_sums_16_bits_in_float32(num_elements: int):
    # 256 + 1 rounds back to 256 in bfloat16, 256 + 1 + 1 = 258 does not
    assert run_ranks(gloo_sum_in_float32, 4, num_elements) == [258.0] * 4
