"""Attention whose queries, keys and values are all cut into slices of rows, one per device (ring attention).

Keys and values travel round a ring: every device computes with the slice that it holds while the next one is under way,
and joins the results by their sums of exponentials.  So a device never has more than two slices of keys and values, on
several axes one more for each.  Backward they travel again, and their gradients with them, one device behind, each
adding its terms (`autopar.lower.communication.rings`).

Causal rows see the columns up to their own, so the last rows are the most work.  As in `context_attention`, every
device has the first half of its own rows and the second half of the mirrored device's: of 2 n halves the numbers j and
2 n - 1 - j.  Of a slice that came from elsewhere its rows then see either all rows half the columns, or half the rows
all columns, and every step is equal work on all devices.
Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.rings import passing, terms_of_passing
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import (
    Block,
    attend_block,
    block_gradients,
    empty_block,
    join_blocks,
    packed,
    score_scale,
    sum_dtype,
    unpacked,
)

__all__ = ["ring_attention"]


def ring_attention(
    shards: Shards,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    """``aten.scaled_dot_product_attention`` of this device's rows to all columns, of which it has a slice.

    Communicates with its neighbors on the axes of `shards`: forward `key` and `value`, once for each other device;
    backward these, and the gradients of both in float32 at least, which take one step more on each axis.  Causal, also
    halves with the mirrored device: forward of all operands and of the result, backward of the result with its
    gradient, and of the gradients of all operands.

    Args:
        shards: of the rows and columns.
        query: ``[batch, heads, rows, size]``, this device's slice; causal, an even number of rows.
        key: ``[batch, heads or fewer, columns, size]``, its slice of the columns; causal, as many as rows.
        value: likewise.
        attn_mask: None.
        dropout_p: 0.
        is_causal: whether rows see only the columns up to their own.
        settings: ``scale`` of the scores, by default one over the root of the size of a head; ``enable_gqa``, without
            which `key` and `value` have as many heads as `query`.
    """
    if attn_mask is not None or dropout_p:
        raise ValueError("ring_attention has no mask and no dropout")
    scale = score_scale(query, settings.get("scale"))
    return call_function(_RingAttention, query, key, value, _Ring(shards, is_causal), scale)


@dataclass(frozen=True)
class _Ring:
    """The devices in their order, and which rows they have."""

    shards: Shards
    is_causal: bool

    @property
    def has_own_head_first(self) -> bool:
        """Whether the first half of the own rows comes before the mirrored device's second half."""
        return 2 * self.shards.index < self.shards.count

    def balanced(self, x: Tensor) -> Tensor:
        """The rows to compute with, in their order."""
        if not self.is_causal:
            return x
        head, tail = x.chunk(2, 2)
        halves = head, self.shards.exchange_mirrored(tail)
        return torch.cat(halves if self.has_own_head_first else halves[::-1], 2)

    def restored(self, x: Tensor) -> Tensor:
        """This device's own rows, from those that `balanced` gave out."""
        if not self.is_causal:
            return x
        halves = x.chunk(2, 2)
        head, other = halves if self.has_own_head_first else halves[::-1]
        return torch.cat([head, self.shards.exchange_mirrored(other)], 2)

    def seen(self, source: int, rows: int) -> tuple[slice, slice, bool]:
        """What is computed of `rows` rows and the columns of the device `source`: which rows, to which columns, and
        whether each row sees those up to its own only.
        """
        whole, half = slice(0, rows), rows // 2
        if not self.is_causal:
            return whole, slice(None), False  # columns may be more than rows, which another axis can split further
        if source == self.shards.index:
            return whole, whole, True
        if self._first_half(source) < self._first_half(self.shards.index):
            return whole, slice(0, half), False
        return slice(half, rows), whole, False

    def _first_half(self, index: int) -> int:
        """The number of the first of the halves that device `index` computes with."""
        return min(2 * index, 2 * self.shards.count - 1 - 2 * index)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: _Ring, scale: float) -> Tensor:
        q, k, v = map(ring.balanced, (query, key, value))
        rows = q.shape[2]
        out, log_sum = empty_block(q, v, sum_dtype(q))
        for source, received in passing(ring.shards, packed(k, v)):
            keys, values = unpacked(received, k, v)
            own, columns, is_causal = ring.seen(source, rows)
            block = attend_block(
                q[:, :, own], keys[:, :, columns], values[:, :, columns], scale, is_causal=is_causal
            )  # fmt: skip
            before = Block(out[:, :, own], log_sum[:, :, own])
            joined = join_blocks(before, Block(block.out.to(out.dtype), block.log_sum.to(out.dtype)))
            out[:, :, own], log_sum[:, :, own] = joined.out, joined.log_sum
        result = ring.restored(out.to(query.dtype))
        ctx.save_for_backward(q, k, v, result, log_sum)
        ctx.ring, ctx.scale = ring, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, result, log_sum = ctx.saved_tensors
        ring: _Ring = ctx.ring
        out, incoming = ring.balanced(torch.cat([result, gradients[0]], -1)).chunk(2, -1)
        rows = q.shape[2]
        for_q = torch.zeros_like(q, dtype=sum_dtype(q))

        def terms_of(source: int, received: Tensor) -> Tensor:
            keys, values = unpacked(received, k, v)
            own, columns, is_causal = ring.seen(source, rows)
            terms = block_gradients(
                incoming[:, :, own], q[:, :, own], keys[:, :, columns], values[:, :, columns],
                Block(out[:, :, own], log_sum[:, :, own]), ctx.scale, is_causal=is_causal,
            )  # fmt: skip
            for_q[:, :, own] += terms[0]
            totals = [torch.zeros_like(x, dtype=sum_dtype(q)) for x in (k, v)]
            for total, term in zip(totals, terms[1:], strict=True):
                total[:, :, columns] = term
            return packed(*totals)

        for_k, for_v = unpacked(terms_of_passing(ring.shards, packed(k, v), terms_of), k, v)
        for_query, for_key, for_value = (ring.restored(x.to(q.dtype)) for x in (for_q, for_k, for_v))
        return for_query, for_key, for_value, None, None
