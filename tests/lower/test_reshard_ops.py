"""`reshard_tensor` for all layouts against the whole tensor, and buckets against tensor by tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.lower.communication.buckets import start_gather_bucket, start_reduce_bucket
from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.null_communicator import NullCommunicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.reshard_ops import (
    apply_backward,
    apply_forward,
    reshard_tensor,
    time_slice,
)
from autopar.lower.communication.simulated_ranks import simulate
from autopar.placement import (
    BROADCAST,
    PARTIAL,
    REPLICATE,
    Axis,
    Layout,
    Placement,
    format_layout,
    mesh_axes,
    reshard,
    shard,
)
from tests.ranks import run_ranks

PLACEMENTS = (REPLICATE, shard(0), shard(1), PARTIAL, BROADCAST)
PAIRS = tuple(itertools.product(PLACEMENTS, PLACEMENTS))
GRADIENT = {"R": REPLICATE, "P": REPLICATE, "B": PARTIAL}  # the form of the gradient; S stays S
SHAPE = (8, 24)
PARTED = tuple(
    pair for pair in itertools.product((REPLICATE, shard(0), shard(1), shard(1, 2)), repeat=2) if shard(1, 2) in pair
)


def split(whole: Tensor, layout: Layout, mesh: tuple[int, ...]) -> list[Tensor]:
    """What each rank holds of `whole`; terms are random, and sum to it."""
    parts = {(): whole}
    for axis, placement in zip(mesh_axes(mesh), layout, strict=True):
        parts = {
            (*at, i): piece
            for at, part in parts.items()
            for i, piece in enumerate(_split_axis(part, placement, axis.size))
        }
    return [parts[at] for at in sorted(parts)]


def _split_axis(part: Tensor, placement, size: int) -> list[Tensor]:
    if placement.is_shard:
        slices = [piece.chunk(size, placement.dim) for piece in part.chunk(placement.parts, placement.dim)]
        return [torch.cat(own, placement.dim) for own in zip(*slices, strict=True)]
    if placement == PARTIAL:
        terms = [torch.randn_like(part) for _ in range(size - 1)]
        return [*terms, part - sum(terms)]
    return [part] * size


def join(parts: list[Tensor], layout: Layout, mesh: tuple[int, ...]) -> Tensor:
    """The whole tensor; replicas must agree."""
    for axis, placement in reversed(list(zip(mesh_axes(mesh), layout, strict=True))):
        groups = [parts[i : i + axis.size] for i in range(0, len(parts), axis.size)]
        parts = [_join_axis(group, placement) for group in groups]
    return parts[0]


def _join_axis(group: list[Tensor], placement) -> Tensor:
    if placement.is_shard:
        slices = [part.chunk(placement.parts, placement.dim) for part in group]
        return torch.cat([piece for own in zip(*slices, strict=True) for piece in own], placement.dim)
    if placement == PARTIAL:
        return torch.stack(group).sum(0)
    for other in group[1:]:
        torch.testing.assert_close(other, group[0], rtol=0, atol=1e-12)
    return group[0]


def gradient_layout(layout: Layout) -> Layout:
    return tuple(GRADIENT.get(placement.kind, placement) for placement in layout)


def check_reshard(src: Layout, dst: Layout, mesh: tuple[int, ...]) -> None:
    world = len(split(torch.zeros(SHAPE), src, mesh))
    torch.manual_seed(1)
    value, gradient = torch.randn(2, *SHAPE, dtype=torch.float64)
    values, gradients = split(value, src, mesh), split(gradient, gradient_layout(dst), mesh)
    steps = reshard(src, dst, mesh)

    def run(c: Communicator) -> tuple[Tensor, Tensor]:
        x = values[c.rank].clone().requires_grad_()
        y = reshard_tensor(x, steps, c)
        (got,) = torch.autograd.grad(y, x, gradients[c.rank])
        return y.detach(), got

    after, before = zip(*simulate(world, run), strict=True)
    # BROADCAST and REPLICATE hold the same value, so `join` treats them alike
    torch.testing.assert_close(join(list(after), dst, mesh), value, rtol=0, atol=1e-12)
    torch.testing.assert_close(join(list(before), gradient_layout(src), mesh), gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mesh", [(2,), (4,)], ids=str)
def test_every_pair_on_one_axis(mesh: tuple[int, ...]):
    for src, dst in itertools.product((*PLACEMENTS, shard(1, 2), shard(1, 3)), repeat=2):
        check_reshard((src,), (dst,), mesh)


@pytest.mark.parametrize("src", PAIRS, ids=format_layout)
def test_every_pair_on_two_axes(src: Layout):
    for dst in PAIRS:
        check_reshard(src, dst, (2, 2))


@pytest.mark.parametrize("parted", PARTED, ids=format_layout)
def test_slices_of_each_part_on_two_axes(parted: Layout):
    for other in (*PARTED, (shard(0), shard(0)), (BROADCAST, shard(0)), (PARTIAL, PARTIAL)):
        check_reshard(parted, other, (2, 2))
        check_reshard(other, parted, (2, 2))


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=format_layout)
def test_compiled_layers_of_all_ranks_have_the_same_ops(src: Placement, dst: Placement):
    """A compiler decides by the ops what runs forward and what backward: ranks that differ wait for each other forever.

    It folds constants first, so what replaces a tensor on other ranks must depend on the tensor.
    """
    steps = reshard((src,), (dst,), (2,))
    value = torch.randn(SHAPE)

    def trace(rank: int) -> torch.fx.GraphModule:
        local = split(value, (src,), (2,))[rank]
        return make_fx(lambda x: reshard_tensor(x, steps, NullCommunicator(2, rank=rank)))(local)

    graphs = [trace(rank) for rank in range(2)]
    assert len({tuple(node.target for node in graph.graph.nodes) for graph in graphs}) == 1
    if (src, dst) == (REPLICATE, PARTIAL):
        first, second = (graph(value) for graph in graphs)
        torch.testing.assert_close(first, value, rtol=0, atol=0)
        torch.testing.assert_close(second, torch.zeros_like(value), rtol=0, atol=0)
        for graph in graphs:
            assert all(node.users for node in graph.graph.nodes if node.op == "placeholder")


def test_what_is_stored_in_slices_of_another_dim_is_exchanged_once():
    steps = reshard((shard(0),), (shard(1, 2),), (4,))
    assert [(step.forward, step.backward, step.fraction) for step in steps] == [("all_to_all", "all_to_all", 0.25)]


def test_a_wrong_backward_would_be_seen():
    """The check itself: a gradient that misses its all-reduce does not pass."""
    from unittest import mock

    with (
        mock.patch("autopar.lower.communication.reshard_ops.apply_backward", lambda gradient, steps, c: gradient),
        pytest.raises(AssertionError),
    ):
        check_reshard((REPLICATE,), (BROADCAST,), (2,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool], ids=str)
def test_integers_move_without_gradient(dtype: torch.dtype):
    whole = (torch.arange(192).view(SHAPE) % 5).to(dtype)
    steps = reshard((shard(0),), (shard(1),), (4,))
    results = simulate(4, lambda c: reshard_tensor(whole.chunk(4, 0)[c.rank], steps, c))
    assert torch.equal(torch.cat(results, 1), whole)
    assert not any(result.requires_grad for result in results)


def test_no_steps_is_the_tensor_itself():
    x = torch.ones(2, requires_grad=True)
    assert all(simulate(2, lambda c: reshard_tensor(x, (), c) is x))


def test_not_differentiable_when_asked_or_under_no_grad():
    x = torch.ones(2, 2, requires_grad=True)
    steps = reshard((REPLICATE,), (BROADCAST,), (2,))

    def run(c: Communicator) -> list[bool]:
        outputs = [reshard_tensor(x, steps, c, differentiable=False), reshard_tensor(x, steps, c)]
        with torch.no_grad():
            outputs.append(reshard_tensor(x, steps, c))
        return [y.requires_grad for y in outputs]

    assert simulate(2, run) == [[False, True, False]] * 2


def test_a_slice_does_not_keep_the_whole_alive():
    def run(c: Communicator) -> int:
        y = reshard_tensor(torch.zeros(8, 8), reshard((REPLICATE,), (shard(1),), (4,)), c)
        return y.untyped_storage().nbytes()

    assert simulate(4, run) == [8 * 2 * 4] * 4


def test_a_dim_that_does_not_divide_is_an_error():
    steps = reshard((REPLICATE,), (shard(0),), (4,))
    with pytest.raises(ValueError, match=r"dim 0 .*\(6, 2\).* 4 devices"):
        simulate(4, lambda c: reshard_tensor(torch.zeros(6, 2), steps, c))
    with pytest.raises(ValueError, match=r"dim 1 .*\(6, 5\).* 2 microbatches"):
        time_slice(torch.zeros(6, 5), 1, 0, 2)


def test_time_slices_cover_the_whole_and_their_gradients_add_up():
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    slices = [time_slice(x, 1, index, 3) for index in range(3)]
    assert torch.equal(torch.cat(slices, 1), x)
    sum(i * s.sum() for i, s in enumerate(slices)).backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 0, 1, 1, 2, 2], dtype=torch.float64).expand(4, 6))


STORED: tuple[tuple[tuple[int, ...], Layout, Layout, torch.dtype], ...] = (
    ((8, 4), (shard(0), shard(0)), (REPLICATE, BROADCAST), torch.float32),
    ((8, 12), (shard(0), shard(1)), (BROADCAST, shard(1)), torch.float32),
    ((4, 8, 2), (shard(1), REPLICATE), (BROADCAST, BROADCAST), torch.float32),
    ((4, 8), (shard(0), shard(1)), (shard(1), shard(0)), torch.float32),
    ((16,), (REPLICATE, REPLICATE), (BROADCAST, BROADCAST), torch.float32),
    ((8, 4), (shard(1), shard(0)), (BROADCAST, BROADCAST), torch.bfloat16),
    ((), (REPLICATE, REPLICATE), (BROADCAST, REPLICATE), torch.float32),
    ((2, 2), (REPLICATE, shard(0)), (REPLICATE, shard(0)), torch.float32),
    ((4, 16), (shard(1), shard(0)), (BROADCAST, shard(1, 2)), torch.float32),
)


def run_buckets(c: Communicator) -> tuple[list[Collective], list[Collective]]:
    mesh = (2, 2)
    steps = [reshard(stored, used, mesh) for _, stored, used, _ in STORED]
    torch.manual_seed(3)
    wholes = [torch.randint(-8, 8, shape).to(dtype) for shape, _, _, dtype in STORED]
    layouts = [stored for _, stored, _, _ in STORED]
    kept = [split(whole, stored, mesh)[c.rank] for whole, stored in zip(wholes, layouts, strict=True)]
    with c.recording() as alone:
        expected = [apply_forward(x, own, c) for x, own in zip(kept, steps, strict=True)]
        expected_back = [apply_backward(x + c.rank, own, c) for x, own in zip(expected, steps, strict=True)]
    with c.recording() as together:
        handle = start_gather_bucket(kept, steps, c)
        got = handle.wait()
        got_back = start_reduce_bucket([x + c.rank for x in got], steps, c).wait()
    for one, other in zip(expected + expected_back, got + got_back, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
    return alone, together


def check_bucket_records(alone: list[Collective], together: list[Collective]) -> None:
    def num_bytes(record: list[Collective]) -> dict[tuple[str, Axis], int]:
        total: dict[tuple[str, Axis], int] = {}
        for one in record:
            total[one.kind, one.axis] = total.get((one.kind, one.axis), 0) + one.num_bytes
        return total

    assert num_bytes(alone) == num_bytes(together)
    assert len(together) < len(alone)


def test_buckets_move_what_single_tensors_move_in_fewer_collectives():
    for alone, together in simulate(4, run_buckets):
        check_bucket_records(alone, together)


def test_equal_gathers_share_one_collective():
    steps = [reshard((shard(dim),), (BROADCAST,), (2,)) for dim in (0, 1)]

    def run(c: Communicator) -> tuple[list[Tensor], list[Collective]]:
        with c.recording() as record:
            return start_gather_bucket([torch.full((2, 3), float(c.rank))] * 2, steps, c).wait(), record

    for (rows, columns), record in simulate(2, run):
        assert rows[:, 0].tolist() == [0, 0, 1, 1]
        assert columns[0].tolist() == [0, 0, 0, 1, 1, 1]
        assert record == [Collective("all_gather", Axis(2, 1), 2 * 2 * 6 * 4)]


def gloo_buckets_and_pairs() -> None:
    c = ProcessGroupCommunicator()
    check_bucket_records(*run_buckets(c))
    mesh = (2, 2)
    torch.manual_seed(1)
    value, gradient = torch.randn(2, *SHAPE, dtype=torch.float64)
    for src, dst in itertools.product(PAIRS, repeat=2):
        x = split(value, src, mesh)[c.rank].clone().requires_grad_()
        steps = reshard(src, dst, mesh)
        own_gradient = split(gradient, gradient_layout(dst), mesh)[c.rank]
        y = reshard_tensor(x, steps, c)
        (got,) = torch.autograd.grad(y, x, own_gradient)
        world = Axis(4, 1)
        after = list(c.all_gather(y.detach().unsqueeze(0), world, 0))
        before = list(c.all_gather(got.unsqueeze(0), world, 0))
        torch.testing.assert_close(join(after, dst, mesh), value, rtol=0, atol=1e-12)
        torch.testing.assert_close(join(before, gradient_layout(src), mesh), gradient, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gloo_moves_as_simulated_ranks_do():
    run_ranks(gloo_buckets_and_pairs, 4)
