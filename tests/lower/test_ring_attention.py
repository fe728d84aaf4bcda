"""Attention whose keys and values travel round a ring, against torch's own on the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.shards import Shards
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.kernels import KERNELS
from autopar.lower.kernels.ring_attention import _Ring
from autopar.placement import Axis
from tests.lower.test_context_attention import CASES, ROWS, WORLDS, Operands, operands, place
from tests.ranks import run_ranks


def on_slice(
    c: Communicator, axes: tuple[Axis, ...], inputs: Operands, incoming: Tensor, is_causal: bool, settings: dict
) -> tuple[list[Tensor], list[Collective], list[Collective]]:
    """Result and gradients of this device's rows, and what was communicated, forward and backward."""
    shards = Shards(c, axes)
    size = shards.count
    leaves = [x.chunk(size, 2)[shards.index].clone().requires_grad_() for x in inputs]
    with c.recording() as forward:
        out = KERNELS["ring_attention"](shards, *leaves, None, 0.0, is_causal, **settings)
    with c.recording() as backward:
        out.backward(incoming.chunk(size, 2)[shards.index])
    return [out.detach(), *(x.grad for x in leaves)], forward, backward


def ring_of(size: int) -> tuple[Axis, ...]:
    return (Axis(size, 1),) if size > 1 else ()


def assert_same(
    results: list, inputs: Operands, incoming: Tensor, is_causal: bool, settings: dict, tolerance: float = 1e-12
) -> None:
    leaves = [x.double().requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*leaves, is_causal=is_causal, **settings)
    out.backward(incoming.double())
    whole = [out.detach(), *(x.grad for x in leaves)]
    for got, wanted in zip(zip(*(result[0] for result in results), strict=True), whole, strict=True):
        torch.testing.assert_close(torch.cat(got, 2).double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_causal", [True, False])
def test_slices_are_one_attention(case: str, size: int, is_causal: bool):
    shape, settings = CASES[case]
    inputs = operands(**shape)
    incoming = torch.randn(2, 4, ROWS, inputs[2].shape[-1], dtype=torch.float64)
    results = simulate(size, lambda c: on_slice(c, ring_of(size), inputs, incoming, is_causal, settings))
    assert_same(results, inputs, incoming, is_causal, settings)
    read, slices, result = (
        n // size for n in (sum(x.nbytes for x in inputs), sum(x.nbytes for x in inputs[1:]), incoming.nbytes)
    )
    for _, forward, backward in results if size > 1 else ():
        assert [each.kind for each in forward + backward] == ["send"] * len(forward + backward)
        ahead, back = (sum(each.num_bytes for each in found) for found in (forward, backward))
        assert ahead == (size - 1) * slices + is_causal * (read + result) // 2
        assert back == (2 * size - 1) * slices + is_causal * (read // 2 + result)  # gradients take a step more
        assert (len(forward), len(backward)) == ((size + 3, 2 * size + 3) if is_causal else (size - 1, 2 * size - 1))


@pytest.mark.parametrize(("world", "axes"), [WORLDS["2x3"], WORLDS["2x2 swapped"], (8, (Axis(2, 4), Axis(2, 1)))])
@pytest.mark.parametrize("is_causal", [True, False])
def test_rings_inside_of_rings(world: int, axes: tuple[Axis, ...], is_causal: bool):
    """The inner ring goes round for each step of the outer one; others may run beside."""
    inputs, settings = operands(few=2), {"enable_gqa": True}
    incoming = torch.randn(2, 4, ROWS, 8, dtype=torch.float64)
    results = simulate(
        world, lambda c: (place(axes, c.rank), *on_slice(c, axes, inputs, incoming, is_causal, settings))
    )
    by_shard = {shard: found for shard, *found in results}
    assert_same([by_shard[shard] for shard in sorted(by_shard)], inputs, incoming, is_causal, settings)
    outer, inner = axes
    for _, forward, backward in by_shard.values():
        for axis, rounds in ((outer, 1), (inner, outer.size)):
            ahead, back = (sum(each.axis == axis for each in found) for found in (forward, backward))
            assert ahead == rounds * (axis.size - 1) + 4 * is_causal
            assert back == rounds * (2 * axis.size - 1) + 4 * is_causal


def test_rows_that_another_axis_splits_further():
    """A plan may split the query's rows on an axis more than columns, where no mask says which rows see which."""
    inputs = operands()
    incoming = torch.randn(2, 4, ROWS, 8, dtype=torch.float64)

    def on_rank(c: Communicator) -> list[Tensor]:
        ring = Shards(c, (Axis(2, 1),))
        own = c.rank % 2 * 2 + c.rank // 2  # of four slices of rows, in the half that this device has of the ring's
        query = inputs[0].chunk(4, 2)[own].clone().requires_grad_()
        key, value = (x.chunk(2, 2)[ring.index].clone().requires_grad_() for x in inputs[1:])
        out = KERNELS["ring_attention"](ring, query, key, value, None, 0.0, False)
        out.backward(incoming.chunk(4, 2)[own])
        return [out.detach(), *(x.grad for x in (query, key, value))]

    found = simulate(4, on_rank)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*leaves)
    out.backward(incoming)
    order = [0, 2, 1, 3]  # of ranks, by their rows
    for part, wanted in ((0, out.detach()), (1, leaves[0].grad)):
        torch.testing.assert_close(torch.cat([found[rank][part] for rank in order], 2), wanted, rtol=1e-12, atol=1e-12)
    for part, leaf in ((2, leaves[1]), (3, leaves[2])):  # the other axis adds the terms up
        halves = [found[0][part] + found[2][part], found[1][part] + found[3][part]]
        torch.testing.assert_close(torch.cat(halves, 2), leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype):
    inputs = operands(few=2, dtype=dtype)
    incoming = torch.randn(2, 4, ROWS, 8, dtype=dtype)
    settings = {"enable_gqa": True}
    results = simulate(4, lambda c: on_slice(c, ring_of(4), inputs, incoming, True, settings))
    assert {x.dtype for found, *_ in results for x in found} == {dtype}
    assert_same(results, inputs, incoming, True, settings, 4e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_step_is_the_same_work_on_all_devices(size: int):
    """Pairs of a row and a column, step by step; of the first step, of which half is masked, about half."""

    def pairs(c: Communicator) -> list[int]:
        ring = _Ring(Shards(c, (Axis(size, 1),)), is_causal=True)
        sources = ((ring.shards.index - step) % size for step in range(size))
        steps = (ring.seen(source, 4)[:2] for source in sources)
        return [len(range(4)[rows]) * len(range(4)[columns]) for rows, columns in steps]

    assert simulate(size, pairs) == [[16, *[8] * (size - 1)]] * size


def on_gloo() -> tuple:
    incoming = torch.ones(2, 4, ROWS, 8, dtype=torch.float64)
    return on_slice(ProcessGroupCommunicator(), ring_of(2), operands(few=2), incoming, True, {"enable_gqa": True})


@pytest.mark.slow
def test_processes():
    incoming = torch.ones(2, 4, ROWS, 8, dtype=torch.float64)
    assert_same(run_ranks(on_gloo, 2), operands(few=2), incoming, True, {"enable_gqa": True})


def test_what_it_cannot_do_is_refused():
    inputs = operands()
    with pytest.raises(ValueError, match="no mask and no dropout"):
        simulate(2, lambda c: KERNELS["ring_attention"](Shards(c, (Axis(2, 1),)), *inputs, None, 0.1, True))
