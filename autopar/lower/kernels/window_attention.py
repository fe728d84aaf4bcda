"""Attention in which a token sees only those of its row that are near to it: whole, and with rows cut into slices.

No mask is made.  A band along the diagonal is made of squares, of which corners are causal from the other end, so that
all of it is ordinary attention of tiles; on CUDA devices, in 16 bits, it is one call of torch's attention of variable
lengths.  A slice of the rows needs only the columns next to it: those of the devices before it that are as near, which
one exchange between neighbors brings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import packed, score_scale, unpacked
from autopar.lower.kernels.attention_tiles import (
    Band,
    Tiles,
    attend_tiles,
    attend_varlen,
    band_parts,
    joined_tiles,
    numbers,
    takes_varlen,
    tiles_on,
    tokens_of,
)

__all__ = ["context_windows", "neighbor_windows", "window_attention", "with_previous"]


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int, is_causal: bool
) -> Tensor:
    """Attention in which a token sees those of its row that are less than `window` places away.

    Args:
        query: ``[batch, heads, tokens, size]``.
        key: ``[batch, heads or fewer, tokens, size]``.
        value: likewise.
        scale: of the scores, by default one over the root of the size of a head.
        window: at least 1, which is the token itself.
        is_causal: whether tokens see none that come after them.
    """
    return _attend(query, key, value, scale, Band(query.shape[2], window, is_causal))


def context_windows(
    shards: Shards, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int, is_causal: bool
) -> Tensor:
    """`window_attention` of this device's rows of `query` to all columns.

    Communicates nothing.  The gradients of `key` and `value` are terms (``B``).

    Args:
        shards: of the rows of `query`.
        query: ``[batch, heads, rows, size]``, this device's slice.
        key: see `window_attention`, also for all that follow.
    """
    rows, tokens = query.shape[2], key.shape[2]
    first = shards.index * rows
    low = max(0, first - window + 1)
    high = first + rows if is_causal else min(tokens, first + rows + window - 1)
    band = Band(tokens, window, is_causal, first, low)
    return _attend(query, key[:, :, low:high], value[:, :, low:high], scale, band)


def neighbor_windows(
    shards: Shards, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int, is_causal: bool
) -> Tensor:
    """`window_attention`, causal, of slices of the rows of all operands.

    Communicates forward the last ``window - 1`` rows of `key` and `value`, which the next device gets, and backward
    their gradients, which come back, on the one axis of `shards`.

    Args:
        shards: of the rows.
        query: ``[batch, heads, rows, size]``, this device's slice; at least ``window - 1`` rows.
        key: ``[batch, heads or fewer, rows, size]``, likewise.
        value: see `key`.
        scale: see `window_attention`, also for `window`.
        is_causal: True.
    """
    rows = query.shape[2]
    if len(shards.axes) > 1 or not is_causal or window - 1 > rows:
        raise ValueError("neighbor_windows is causal, on one axis, with a window that reaches no further than a slice")
    first = shards.index * rows
    key, value = with_previous(shards, key, value, window - 1)
    low = first + rows - key.shape[2]
    return _attend(query, key, value, scale, Band(shards.count * rows, window, is_causal, first, low))


def with_previous(shards: Shards, key: Tensor, value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Prepend the last `count` rows of the previous device's slices of `key` and `value`; the first device gets none.

    Communicates a send to the next device, and in backward a send of gradients to the previous one.
    """
    if not shards.axes or not count:
        return key, value
    return call_function(_FromPrevious, key, value, shards, count)


class _FromPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, shards: Shards, count: int) -> tuple[Tensor, Tensor]:
        ctx.shards, ctx.count = shards, count
        coming = _passed((key[:, :, -count:], value[:, :, -count:]), shards, 1)
        if not shards.index:
            return key.clone(), value.clone()
        joined = (torch.cat(pair, 2) for pair in zip(coming, (key, value), strict=True))
        return next(joined), next(joined)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        shards, count = ctx.shards, ctx.count
        is_first, is_last = not shards.index, shards.index == shards.count - 1
        coming = _passed((gradients[0][:, :, :count], gradients[1][:, :, :count]), shards, -1)
        own = [x.clone() if is_first else x[:, :, count:].clone() for x in gradients]
        for total, terms in zip(own, coming, strict=True):
            if not is_last:  # nobody has seen the last one's rows
                total[:, :, -count:] += terms
        return own[0], own[1], None, None


def _passed(parts: tuple[Tensor, Tensor], shards: Shards, step: int) -> tuple[Tensor, Tensor]:
    """What the device `step` places before this one has for these; round the ring, so that all send as much."""
    return unpacked(shards.start_passing(packed(*parts), step).wait(), *parts)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, band: Band) -> Tensor:
    scale = score_scale(query, scale)
    if takes_varlen(query, value):
        return _varlen(query, key, value, scale, band)
    return attend_tiles(query, key, value, _tiles(query, key, band), scale)


def _varlen(query: Tensor, key: Tensor, value: Tensor, scale: float, band: Band) -> Tensor:
    """All rows of the batch in one call, in which the last row of each is next to its last column."""
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    behind = band.low + columns - band.first - rows  # columns after the last row
    reach = band.window - 1
    sides = (reach + behind, -behind if band.is_causal else reach - behind)
    q, k, v = map(tokens_of, (query, key, value))
    row_ends, column_ends = (
        torch.arange(batch + 1, device=query.device, dtype=torch.int32) * n for n in (rows, columns)
    )
    out = attend_varlen(q, k, v, (row_ends, column_ends), (rows, columns), scale, sides)
    return out.view(batch, rows, heads, -1).transpose(1, 2)


def _tiles(query: Tensor, key: Tensor, band: Band) -> list[Tiles]:
    """Of all rows of the batch."""
    batch, num_rows, num_columns = query.shape[0], query.shape[2], key.shape[2]
    tiles: list[Tiles] = []
    for parts in band_parts(band, num_rows):
        numbered = (
            (numbers(own, entry * num_rows - band.first), numbers(seen, entry * num_columns - band.low), is_causal)
            for own, seen, is_causal in parts for entry in range(batch)
        )  # fmt: skip
        tiles += joined_tiles(numbered)
    return tiles_on(query.device, tiles)
