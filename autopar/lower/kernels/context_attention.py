"""Causal attention whose queries are cut into slices, one per device (context parallelism).

Every device has a slice of the rows; row r sees the columns up to r.  So the last device's rows would be the most work
by far.  Each device therefore gives the second half of its rows to the one that is as far from the other end, computes
with the second half of that one's rows, and gives the results back: together a first half and a mirrored second half
see the same number of columns on every device.  Everything else in a model keeps its rows in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import Block, attend_block, block_gradients, join_blocks, score_scale

__all__ = ["context_attention"]


def context_attention(
    shards: Shards,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    **settings: Any,
) -> Tensor:
    """``aten.scaled_dot_product_attention``, causal, of this device's rows to all columns.

    Communicates half of `query` and half of the result forward; backward half of `query`, of the result and of the
    gradients of both: with the mirrored device, on each axis of `shards`.  The gradients of `key` and `value` are
    terms (``B``).

    Args:
        shards: of the rows.
        query: ``[batch, heads, rows, size]``, this device's slice; an even number of rows.
        key: ``[batch, heads or fewer, all rows, size]``.
        value: likewise.
        attn_mask: None.
        dropout_p: 0.
        is_causal: True.
        settings: ``scale`` of the scores, by default one over the root of the size of a head; ``enable_gqa``, without
            which `key` and `value` have as many heads as `query`.
    """
    if attn_mask is not None or dropout_p or not is_causal:
        raise ValueError("context_attention is causal, without a mask and without dropout")
    scale = score_scale(query, settings.get("scale"))
    return call_function(_ContextAttention, query, key, value, shards, scale)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, shards: Shards, scale: float) -> Tensor:
        blocks = [
            _attend(rows, key, value, first, scale)
            for rows, first in zip(_mirrored(shards, query), _firsts(shards, query), strict=True)
        ]
        out = _in_order(shards, [block.out for block in blocks])
        ctx.save_for_backward(query, key, value, out, *(block.log_sum for block in blocks))
        ctx.shards, ctx.scale = shards, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, *log_sums = ctx.saved_tensors
        shards: Shards = ctx.shards
        parts = [_mirrored(shards, query), _halves(out), _halves(gradients[0])]
        tails = shards.exchange_mirrored(torch.stack([parts[1][1], parts[2][1]]))
        outs, incoming = (parts[1][0], tails[0]), (parts[2][0], tails[1])
        for_key, for_value = torch.zeros_like(key), torch.zeros_like(value)
        for_query: list[Tensor] = []
        for rows, first, gradient, *whole in zip(
            parts[0], _firsts(shards, query), incoming, outs, log_sums, strict=True
        ):
            total = None
            for start, stop in _pieces(first, rows.shape[-2]):
                for_rows, for_k, for_v = block_gradients(
                    gradient, rows, key[:, :, start:stop], value[:, :, start:stop], Block(*whole), ctx.scale,
                    is_causal=start == first,
                )  # fmt: skip
                total = for_rows if total is None else total + for_rows
                for_key[:, :, start:stop] += for_k
                for_value[:, :, start:stop] += for_v
            assert total is not None
            for_query.append(total)
        return _in_order(shards, for_query), for_key, for_value, None, None


def _attend(rows: Tensor, key: Tensor, value: Tensor, first: int, scale: float) -> Block:
    """Of rows from number `first` on to all the columns that they see."""
    blocks = [
        attend_block(rows, key[:, :, start:stop], value[:, :, start:stop], scale, is_causal=start == first)
        for start, stop in _pieces(first, rows.shape[-2])
    ]
    return blocks[0] if len(blocks) == 1 else join_blocks(*blocks)


def _pieces(first: int, count: int) -> list[tuple[int, int]]:
    """The columns that rows see from number `first` on: all before them, and of their own those up to each."""
    own = (first, first + count)
    return [(0, first), own] if first else [own]


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    head, tail = x.chunk(2, 2)
    return head, tail


def _mirrored(shards: Shards, x: Tensor) -> tuple[Tensor, Tensor]:
    """This device's first half of the rows, and the mirrored one's second half."""
    head, tail = _halves(x)
    return head, shards.exchange_mirrored(tail)


def _firsts(shards: Shards, x: Tensor) -> tuple[int, int]:
    """The numbers of the first rows of both halves of `_mirrored`."""
    half = x.shape[2] // 2
    mirrored = shards.count - 1 - shards.index
    return 2 * shards.index * half, (2 * mirrored + 1) * half


def _in_order(shards: Shards, parts: list[Tensor]) -> Tensor:
    """This device's rows again, from its first half and the mirrored one's second half."""
    return torch.cat([parts[0], shards.exchange_mirrored(parts[1])], 2)
