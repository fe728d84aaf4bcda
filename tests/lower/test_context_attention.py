"""Attention whose rows are cut into slices against torch's own on the whole, forward and backward."""

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
from autopar.lower.kernels.attention_blocks import attend_block, block_gradients, join_blocks
from autopar.lower.kernels.context_attention import _mirrored
from autopar.placement import Axis
from tests.ranks import run_ranks

WORLDS = {
    "2": (2, (Axis(2, 1),)),
    "3": (3, (Axis(3, 1),)),
    "4": (4, (Axis(4, 1),)),
    "2x3": (6, (Axis(2, 3), Axis(3, 1))),
    "2x2 swapped": (4, (Axis(2, 1), Axis(2, 2))),
}
ROWS = 24

Operands = tuple[Tensor, Tensor, Tensor]


def operands(heads: int = 4, few: int = 4, size: int = 8, value: int = 8, dtype=torch.float64) -> Operands:
    torch.manual_seed(3)
    shapes = (heads, size), (few, size), (few, value)
    query, key, v = (torch.randn(2, ROWS, count, width, dtype=dtype).transpose(1, 2) for count, width in shapes)
    return query, key, v


CASES = {
    "plain": ({}, {}),
    "fewer heads": ({"few": 2}, {"enable_gqa": True}),
    "one head": ({"few": 1, "size": 5, "value": 5}, {"enable_gqa": True}),
    "wide values": ({"value": 12}, {}),
    "scale": ({}, {"scale": 0.7}),
}


def place(axes: tuple[Axis, ...], rank: int) -> int:
    at = 0
    for axis in axes:
        at = at * axis.size + axis.coordinate(rank)
    return at


def whole(inputs: Operands, incoming: Tensor, **settings) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = scaled_dot_product_attention(*leaves, is_causal=True, **settings)
    out.backward(incoming)
    return [out.detach(), *(x.grad for x in leaves)]


def on_slice(c: Communicator, axes: tuple[Axis, ...], inputs: Operands, incoming: Tensor, settings: dict) -> list:
    """The result, the gradients, and what was communicated, forward and backward."""
    shards = Shards(c, axes)
    query = inputs[0].chunk(shards.count, 2)[shards.index].clone().requires_grad_()
    key, value = (x.clone().requires_grad_() for x in inputs[1:])
    with c.recording() as forward:
        out = KERNELS["context_attention"](shards, query, key, value, None, 0.0, True, **settings)
    with c.recording() as backward:
        out.backward(incoming.chunk(shards.count, 2)[shards.index])
    return [[out.detach(), query.grad], [key.grad, value.grad], forward, backward]


def assert_same(results: list, expected: list[Tensor], axes: tuple[Axis, ...], tolerance: float = 1e-12) -> None:
    """Rows of all slices follow each other; gradients of keys and values are terms."""
    in_order = [result for _, result in sorted(enumerate(results), key=lambda item: place(axes, item[0]))]
    rows = [torch.cat(parts, 2) for parts in zip(*(result[0] for result in in_order), strict=True)]
    sums = [sum(terms) for terms in zip(*(result[1] for result in in_order), strict=True)]
    for got, wanted in zip((*rows, *sums), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_slices_of_rows_are_one_attention(case: str, world: str):
    size, axes = WORLDS[world]
    shape, settings = CASES[case]
    inputs = operands(**shape)
    incoming = torch.randn(2, 4, ROWS, inputs[2].shape[-1], dtype=torch.float64)
    results = simulate(size, lambda c: on_slice(c, axes, inputs, incoming, settings))
    assert_same(results, whole(inputs, incoming, **settings), axes)
    half = [inputs[0].nbytes // size // 2, incoming.nbytes // size // 2]  # of the query, of the result
    for *_, forward, backward in results:
        assert sorted(forward, key=repr) == sorted((Collective("send", a, n) for n in half for a in axes), key=repr)
        sent = half[0], 2 * half[1], half[0]
        assert sorted(backward, key=repr) == sorted((Collective("send", a, n) for n in sent for a in axes), key=repr)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_work_is_the_same_on_all_devices(size: int):
    """Which device has which rows says how many pairs of a row and a column it computes."""

    def num_pairs(c: Communicator) -> int:
        rows = torch.arange(ROWS).view(1, 1, -1, 1).chunk(size, 2)[c.rank]
        mirrored = torch.cat(_mirrored(Shards(c, (Axis(size, 1),)), rows), 2)
        return int((mirrored + 1).sum())

    assert simulate(size, num_pairs) == [ROWS * (ROWS + 1) // 2 // size] * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype):
    axes = (Axis(2, 1),)
    inputs = operands(dtype=dtype)
    incoming = torch.randn(2, 4, ROWS, 8, dtype=dtype)
    results = simulate(2, lambda c: on_slice(c, axes, inputs, incoming, {}))
    expected = whole(tuple(x.double() for x in inputs), incoming.double())
    assert_same(results, [x.to(dtype) for x in expected], axes, 4e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("value", [8, 12])  # a fast kernel, and plain products
def test_blocks_join(value: int):
    query, key, v = operands(value=value)
    leaves = [x.clone().requires_grad_() for x in (query, key, v)]
    expected = scaled_dot_product_attention(*leaves, scale=0.3)
    incoming = torch.randn_like(expected)
    expected.backward(incoming)
    parts = [(key[:, :, part], v[:, :, part]) for part in (slice(0, 5), slice(5, 6), slice(6, ROWS))]
    blocks = [attend_block(query, *part, 0.3, is_causal=False) for part in parts]
    joined = join_blocks(join_blocks(blocks[0], blocks[1]), blocks[2])
    torch.testing.assert_close(joined.out, expected, rtol=1e-12, atol=1e-12)
    terms = [block_gradients(incoming, query, *part, joined, 0.3, is_causal=False) for part in parts]
    for_query, *others = zip(*terms, strict=True)
    got = sum(for_query), *(torch.cat(each, 2) for each in others)
    for each, leaf in zip(got, leaves, strict=True):
        torch.testing.assert_close(each, leaf.grad, rtol=1e-12, atol=1e-12)


def on_gloo() -> list:
    axes = (Axis(2, 1),)
    inputs, incoming = operands(few=2), torch.ones(2, 4, ROWS, 8, dtype=torch.float64)
    return on_slice(ProcessGroupCommunicator(), axes, inputs, incoming, {"enable_gqa": True})[:2]


@pytest.mark.slow
def test_processes():
    incoming = torch.ones(2, 4, ROWS, 8, dtype=torch.float64)
    assert_same(run_ranks(on_gloo, 2), whole(operands(few=2), incoming, enable_gqa=True), (Axis(2, 1),))


def test_what_it_cannot_do_is_refused():
    inputs = operands()
    with pytest.raises(ValueError, match="causal, without a mask"):
        simulate(2, lambda c: KERNELS["context_attention"](Shards(c, (Axis(2, 1),)), *inputs, None, 0.1, True))
