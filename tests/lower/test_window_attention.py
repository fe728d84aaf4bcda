"""Attention of tokens that are near to each other against a mask, whole and with rows cut into slices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autopar.lower.communication.collectives import Collective
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.shards import Shards
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.kernels import KERNELS, OPS
from autopar.lower.kernels.attention_tiles import Band, band_parts
from autopar.ops.attention import WINDOWS
from autopar.placement import Axis
from tests.ranks import run_ranks

TOKENS = 24
SHAPES = {"plain": (4, 4, 8, 8), "fewer heads, wide values": (4, 2, 6, 10)}


def near(tokens: int, window: int, is_causal: bool) -> Tensor:
    places = torch.arange(tokens)
    away = places[:, None] - places
    return (away.abs() < window) & ((away >= 0) | (not is_causal))


def operands(shape: str, tokens: int = TOKENS) -> list[Tensor]:
    torch.manual_seed(3)
    heads, few, size, wide = SHAPES[shape]
    sizes = (heads, size), (few, size), (few, wide)
    return [torch.randn(2, tokens, n, d, dtype=torch.float64).transpose(1, 2) for n, d in sizes]


def by_mask(inputs: list[Tensor], incoming: Tensor, window: int, is_causal: bool) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, near(q.shape[2], window, is_causal), scale=0.3)
    return [out.detach(), *torch.autograd.grad(out, leaves, incoming)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("tokens", "window"), [(24, 1), (24, 2), (24, 5), (24, 12), (23, 7), (24, 24), (24, 40), (1, 3)]
)
def test_a_band_is_that_of_a_mask(tokens: int, window: int, is_causal: bool) -> None:
    inputs = operands("fewer heads, wide values", tokens)
    incoming = torch.randn(2, 4, tokens, 10, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = OPS[WINDOWS](*leaves, 0.3, window, is_causal)
    found = [out.detach(), *torch.autograd.grad(out, leaves, incoming)]
    for one, other in zip(found, by_mask(inputs, incoming, window, is_causal), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_slices_have_each_pair_once(is_causal: bool) -> None:
    """Every slice of rows, with every window: what tiles cover is what is seen, and no row is twice in one call."""
    for window in range(1, 14):
        for first in range(12):
            for stop in range(first + 1, 13):
                seen = torch.zeros(12, 12, dtype=torch.int64)
                for parts in band_parts(Band(12, window, is_causal, first), stop - first):
                    rows = [row for own, *_ in parts for row in own]
                    assert len(rows) == len(set(rows))
                    for own, columns, causal in parts:
                        for at, row in enumerate(own):
                            for column in columns[: at + 1] if causal else columns:
                                seen[row, column] += 1
                wanted = near(12, window, is_causal).long()
                wanted[:first] = wanted[stop:] = 0
                assert torch.equal(seen, wanted), (window, first, stop)


def on_slice(c: Any, kernel: str, axes: tuple[Axis, ...], inputs: list[Tensor], incoming: Tensor, window: int,
             is_causal: bool) -> tuple[list[Tensor], list[Collective]]:  # fmt: skip
    shards = Shards(c, axes)
    own = [x if place and kernel == "context_windows" else x.chunk(shards.count, 2)[shards.index]
           for place, x in enumerate(inputs)]  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in own]
    with c.recording() as sent:
        out = KERNELS[kernel](shards, *leaves, 0.3, window, is_causal)
        found = torch.autograd.grad(out, leaves, incoming.chunk(shards.count, 2)[shards.index])
    return [out.detach(), *found], sent


CASES = [
    ("neighbor_windows", (Axis(2, 1),), True), ("neighbor_windows", (Axis(4, 1),), True),
    ("context_windows", (Axis(2, 1),), False), ("context_windows", (Axis(3, 1),), True),
    ("context_windows", (Axis(2, 2), Axis(2, 1)), False),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [1, 2, 5, 7])
@pytest.mark.parametrize(("kernel", "axes", "is_causal"), CASES)
def test_slices_are_one_attention(
    kernel: str, axes: tuple[Axis, ...], is_causal: bool, window: int, shape: str
) -> None:
    inputs = operands(shape)
    incoming = torch.randn(2, 4, TOKENS, SHAPES[shape][-1], dtype=torch.float64)
    size = math.prod(axis.size for axis in axes)
    results = simulate(size, lambda c: on_slice(c, kernel, axes, inputs, incoming, window, is_causal))
    assert_same(results, kernel, by_mask(inputs, incoming, window, is_causal))
    halo = sum(x[:, :, : window - 1].nbytes for x in inputs[1:])
    sends = [Collective("send", axes[0], halo)] * 2 if kernel == "neighbor_windows" and window > 1 else []
    assert all(sent == sends for _, sent in results)


def assert_same(results: list, kernel: str, wanted: list[Tensor]) -> None:
    parts = list(zip(*(found for found, _ in results), strict=True))
    are_slices = (True, True, *[kernel == "neighbor_windows"] * 2)
    for each, is_slice, other in zip(parts, are_slices, wanted, strict=True):
        found = torch.cat(each, 2) if is_slice else torch.stack(each).sum(0)
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)


def on_gloo() -> tuple:
    incoming = torch.ones(2, 4, TOKENS, 8, dtype=torch.float64)
    return on_slice(ProcessGroupCommunicator(), "neighbor_windows", (Axis(2, 1),), operands("plain"), incoming, 5, True)


def test_processes() -> None:
    incoming = torch.ones(2, 4, TOKENS, 8, dtype=torch.float64)
    assert_same(run_ranks(on_gloo, 2), "neighbor_windows", by_mask(operands("plain"), incoming, 5, True))


def test_a_window_reaches_one_device() -> None:
    inputs = operands("plain")
    with pytest.raises(ValueError, match="reaches no further than a slice"):
        simulate(4, lambda c: KERNELS["neighbor_windows"](Shards(c, (Axis(4, 1),)), *inputs, None, 26, True))
