"""Attention of rows that hold several documents one after the other, each of which sees itself alone.

No mask is made.  Documents of equal length are one batch of ordinary attention; on CUDA devices, in 16 bits, all are
one call of torch's attention of variable lengths.  Where the rows of queries are cut over devices, what a device has of
a document sees the columns before it and its own, which are two blocks that are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import score_scale
from autopar.lower.kernels.attention_tiles import (
    Band,
    Tiles,
    attend_tiles,
    attend_varlen,
    band_parts,
    joined_tiles,
    numbers,
    takes_varlen,
    tokens_of,
)

__all__ = ["context_documents", "document_attention", "document_order"]


def document_attention(  # noqa: PLR0913  (its arguments)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    scale: float | None,
    is_causal: bool,
    is_sorted: bool,
    length: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Attention in which a token sees the tokens of its row that have its id, with `is_causal` those up to itself.

    Waits on the host for where documents end.

    Args:
        query: ``[batch, heads, tokens, size]``.
        key: ``[batch, heads or fewer, tokens, size]``.
        value: likewise.
        ids: integers, ``[tokens]`` or ``[batch or 1, tokens]``: the document of each token.
        scale: of the scores, by default one over the root of the size of a head.
        is_causal: whether tokens see none that come after them.
        is_sorted: ids never fall along a row.
        length: for prices only.
        window: tokens see those that are less than so many places away, 0: all; documents are then in order.
    """
    del length
    scale = score_scale(query, scale)
    order, lengths = document_order(ids, query.shape[0], query.shape[2], is_sorted=is_sorted)
    if takes_varlen(query, value):
        moved = None if is_sorted else order
        return _varlen(query, key, value, moved, lengths, scale, is_causal=is_causal, window=window)
    tiles = [each for tokens in _by_length(order, lengths) for each in _tiles(tokens, window, is_causal=is_causal)]
    return attend_tiles(query, key, value, tiles, scale)


def context_documents(  # noqa: PLR0913  (its arguments)
    shards: Shards,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    scale: float | None,
    is_causal: bool,
    is_sorted: bool,
    length: float = 0.0,
    window: int = 0,
) -> Tensor:
    """`document_attention` of this device's rows of `query` to all columns.

    With `is_causal` it communicates as `context_attention` does: the second half of the rows is computed by the
    mirrored device, so that one long document is equal work everywhere.  The gradients of `key` and `value` are terms.

    Args:
        shards: of the rows of `query`, and of nothing else.
        query: ``[batch, heads, rows, size]``, this device's slice; an even number of rows.
        key: see `document_attention`, also for all that follow.
    """
    del length
    scale = score_scale(query, scale)
    order, lengths = document_order(ids, key.shape[0], key.shape[2], is_sorted=is_sorted)
    head, tail = query.chunk(2, 2)
    half, mirrored = head.shape[2], shards.count - 1 - shards.index
    firsts = (2 * shards.index * half, (2 * mirrored + 1) * half)
    rows = torch.cat([head, _Mirrored.of(tail, shards)], 2)
    tiles = _tiles_of_slices(order, lengths, key.shape[2], firsts, half, window, is_causal=is_causal)
    out = attend_tiles(rows, key, value, tiles, scale)
    first, second = out.chunk(2, 2)
    return torch.cat([first, _Mirrored.of(second, shards)], 2)


class _Mirrored(torch.autograd.Function):
    """The mirrored device's rows, whose gradients go back to it."""

    @classmethod
    def of(cls, x: Tensor, shards: Shards) -> Tensor:
        return call_function(cls, x, shards)

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return shards.exchange_mirrored(x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None]:
        return ctx.shards.exchange_mirrored(gradients[0].contiguous()), None


# ---------------------------------------------------------------- which tokens are a document


def document_order(ids: Tensor, batch: int, tokens: int, *, is_sorted: bool) -> tuple[Tensor, list[int]]:
    """The tokens ``[batch * tokens]`` by document, in their order in each, by number; and how many each one has."""
    ids = ids.expand(batch, tokens)
    numbers = torch.arange(batch * tokens, device=ids.device).view(batch, tokens)
    if not is_sorted:
        ids, order = torch.sort(ids, dim=1, stable=True)
        numbers = numbers.gather(1, order)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = cast("list[int]", cast("Any", begins.view(-1).nonzero().view(-1)).tolist())
    ends = [*starts[1:], batch * tokens]
    return numbers.view(-1), [end - start for start, end in zip(starts, ends, strict=True)]


def _by_length(order: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The tokens ``[documents, length]`` of all documents of one length, for each length."""
    starts: dict[int, list[int]] = {}
    at = 0
    for length in lengths:
        starts.setdefault(length, []).append(at)
        at += length
    return [
        order[torch.tensor(each, device=order.device)[:, None] + torch.arange(length, device=order.device)]
        for length, each in starts.items()
    ]


def _tiles(tokens: Tensor, window: int, *, is_causal: bool) -> list[Tiles]:
    """Of documents ``[documents, length]`` of one length."""
    length = tokens.shape[1]
    if not window or window >= length:
        return [Tiles(tokens, tokens, is_causal)]
    parts = band_parts(Band(length, window, is_causal), length)
    return [
        tile
        for part in parts
        for tile in joined_tiles(
            (document[numbers(own)], document[numbers(seen)], causal)
            for own, seen, causal in part
            for document in tokens
        )
    ]


def _tiles_of_slices(
    order: Tensor,
    lengths: Sequence[int],
    tokens: int,
    firsts: Iterable[int],
    half: int,
    window: int,
    *,
    is_causal: bool,
) -> list[Tiles]:
    """Tiles for two slices of `half` rows each, which begin at `firsts` in a row of so many `tokens`.

    What a slice has of a document are neighbors in it, as documents are in the order of their tokens.
    """
    parts: list[tuple[Tensor, Tensor, bool]] = []
    bands: dict[int, list[tuple[Tensor, Tensor, bool]]] = {}
    places = order % tokens
    for slice_number, first in enumerate(firsts):
        inside = (places >= first) & (places < first + half)
        counts, befores = _count(inside, lengths), _count(places < first, lengths)
        at = 0
        for length, count, before in zip(lengths, counts, befores, strict=True):
            document = order[at : at + length]
            at += length
            if not count:
                continue
            own = document[before : before + count]
            rows = own // tokens * (2 * half) + (own % tokens - first) + slice_number * half
            if window:
                for place, part in enumerate(band_parts(Band(length, window, is_causal, before), count)):
                    bands.setdefault(place, []).extend(
                        (rows[numbers(each) - before], document[numbers(seen)], causal) for each, seen, causal in part
                    )
                continue
            if not is_causal:
                parts.append((rows, document, False))
                continue
            parts.append((rows, own, True))
            if before:
                parts.append((rows, document[:before], False))
    return [tile for each in (parts, *bands.values()) for tile in joined_tiles(each)]


def _count(which: Tensor, lengths: Sequence[int]) -> list[int]:
    """How many of each document's tokens are marked."""
    sums = torch.cat([which.new_zeros(1, dtype=torch.int64), which.cumsum(0)])
    ends = torch.tensor([0, *lengths], device=which.device).cumsum(0)
    return cast("Any", sums[ends].diff()).tolist()


# ---------------------------------------------------------------- how they are computed


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    order: Tensor | None,
    lengths: list[int],
    scale: float,
    *,
    is_causal: bool,
    window: int,
) -> Tensor:
    """All documents in one call; `order` as in `document_order`, None if that is how they are."""
    batch, heads, tokens, _ = query.shape
    ends = torch.tensor([0, *lengths], device="cpu").cumsum(0).to(query.device, torch.int32)
    q, k, v = (tokens_of(x) if order is None else tokens_of(x).index_select(0, order) for x in (query, key, value))
    longest = max(lengths)
    sides = (window - 1, 0 if is_causal else window - 1)
    out = attend_varlen(q, k, v, (ends, ends), (longest, longest), scale, sides)
    if order is not None:
        out = torch.empty_like(out).index_copy(0, order, out)
    return out.view(batch, tokens, heads, -1).transpose(1, 2)
