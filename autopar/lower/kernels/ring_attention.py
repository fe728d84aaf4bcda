"""Attention whose queries, keys and values are all cut into slices of rows, one per device (ring attention).

Keys and values travel round a ring: every device computes with the slice that it holds while the next one is under way,
and joins the results by their sums of exponentials.  So a device never has more than two slices of keys and values.
Backward they travel again, and their gradients with them, one device behind, each adding its terms.

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
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import (
    Block,
    attend_block,
    block_gradients,
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
    """``aten.scaled_dot_product_attention`` of this device's rows to all columns, of which it has as many.

    Communicates with its neighbours on the one axis of `shards`: forward `key` and `value`, once for each other device;
    backward these, and the gradients of both in float32 at least, which take one step more.  Causal, also halves with
    the mirrored device: forward of all operands and of the result, backward of the result with its gradient, and of
    the gradients of all operands.

    Args:
        shards: of the rows and columns.
        query: ``[batch, heads, rows, size]``, this device's slice; an even number of rows.
        key: ``[batch, heads or fewer, rows, size]``, likewise.
        value: likewise.
        attn_mask: None.
        dropout_p: 0.
        is_causal: whether rows see only the columns up to their own.
        settings: ``scale`` of the scores, by default one over the root of the size of a head; ``enable_gqa``, without
            which `key` and `value` have as many heads as `query`.
    """
    if attn_mask is not None or dropout_p or len(shards.axes) > 1:
        raise ValueError("ring_attention has no mask and no dropout, and runs on one axis")
    scale = score_scale(query, settings.get("scale"))
    return call_function(_RingAttention, query, key, value, _Ring(shards, is_causal), scale)


@dataclass(frozen=True)
class _Ring:
    """The devices in their order on one axis, and which rows they have."""

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

    def seen(self, step: int, rows: int) -> tuple[slice, slice, bool]:
        """What is computed after so many steps of `rows` rows and as many columns: which rows, to which columns, and
        whether each row sees those up to its own only.
        """
        whole, half = slice(0, rows), rows // 2
        source = (self.shards.index - step) % self.shards.count
        if not self.is_causal or not step:
            return whole, whole, self.is_causal
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
        count, rows = ring.shards.count, q.shape[2]
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=sum_dtype(q))
        log_sum = q.new_full(q.shape[:3], -torch.inf, dtype=sum_dtype(q))
        held = packed(k, v)
        for step in range(count):
            coming = ring.shards.start_passing(held) if step + 1 < count else None
            keys, values = unpacked(held, k, v)
            own, columns, is_causal = ring.seen(step, rows)
            block = attend_block(
                q[:, :, own], keys[:, :, columns], values[:, :, columns], scale, is_causal=is_causal
            )  # fmt: skip
            before = Block(out[:, :, own], log_sum[:, :, own])
            joined = join_blocks(before, Block(block.out.to(out.dtype), block.log_sum.to(out.dtype)))
            out[:, :, own], log_sum[:, :, own] = joined.out, joined.log_sum
            held = held if coming is None else coming.wait()
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
        count, rows = ring.shards.count, q.shape[2]
        for_q = torch.zeros_like(q, dtype=sum_dtype(q))
        held, carried = packed(k, v), None
        for step in range(count):
            coming = ring.shards.start_passing(held) if step + 1 < count else None
            keys, values = unpacked(held, k, v)
            own, columns, is_causal = ring.seen(step, rows)
            terms = block_gradients(
                incoming[:, :, own], q[:, :, own], keys[:, :, columns], values[:, :, columns],
                Block(out[:, :, own], log_sum[:, :, own]), ctx.scale, is_causal=is_causal,
            )  # fmt: skip
            for_q[:, :, own] += terms[0]
            totals = [torch.zeros_like(x, dtype=sum_dtype(q)) for x in (k, v)]
            for total, term in zip(totals, terms[1:], strict=True):
                total[:, :, columns] = term
            added = packed(*totals)
            carried = ring.shards.start_passing(added if carried is None else added + carried.wait())
            held = held if coming is None else coming.wait()
        assert carried is not None
        for_k, for_v = unpacked(carried.wait(), k, v)
        for_query, for_key, for_value = (ring.restored(x.to(q.dtype)) for x in (for_q, for_k, for_v))
        return for_query, for_key, for_value, None, None
