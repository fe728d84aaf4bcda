"""Attention of rows that hold several documents one after the other, each of which sees itself alone.

No mask is made.  Documents of equal length are one batch of ordinary attention; on CUDA devices, in 16 bits, all are
one call of torch's attention of variable lengths.  Where the rows of queries are cut over devices, what a device has of
a document sees the columns before it and its own, which are two blocks that are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import (
    Block,
    attend_block,
    block_gradients,
    join_blocks,
    score_scale,
    sum_dtype,
)

__all__ = ["context_documents", "document_attention"]

_VARLEN_MOST, _VARLEN_UNIT = 256, 8
"""The largest head that torch's attention of variable lengths takes, and what its size divides by."""


class _Tiles(NamedTuple):
    """Tiles of one shape: the tokens of queries ``[tiles, rows]`` and of keys ``[tiles, columns]``, by number.

    `is_causal`: there are as many columns as rows, and each row sees those up to its own.
    """

    rows: Tensor
    columns: Tensor
    is_causal: bool


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ids: Tensor,
    scale: float | None,
    is_causal: bool,
    is_sorted: bool,
    length: float = 0.0,
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
    """
    del length
    scale = score_scale(query, scale)
    order, lengths = _documents(ids, query, is_sorted=is_sorted)
    if _takes_varlen(query, value):
        moved = None if is_sorted else order
        return _varlen(query, key, value, moved, lengths, scale, is_causal=is_causal)
    tiles = [_Tiles(tokens, tokens, is_causal) for tokens in _by_length(order, lengths)]
    return call_function(_TiledAttention, query, key, value, tiles, scale)


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
) -> Tensor:
    """`document_attention` of this device's rows of `query` to all columns.

    With `is_causal` it communicates as `context_attention` does: the second half of the rows is computed by the
    mirrored device, so that one long document is equal work everywhere.  The gradients of `key` and `value` are terms.

    Args:
        shards: of the rows of `query`, and of nothing else.
        query: ``[batch, heads, rows, size]``, this device's slice; an even number of rows.
        key: see `document_attention`; likewise all others.
        value: see `key`.
        ids: see `key`.
        scale: see `key`.
        is_causal: see `key`.
        is_sorted: see `key`.
        length: for prices only.
    """
    del length
    scale = score_scale(query, scale)
    order, lengths = _documents(ids, key, is_sorted=is_sorted)
    head, tail = query.chunk(2, 2)
    half, mirrored = head.shape[2], shards.count - 1 - shards.index
    firsts = (2 * shards.index * half, (2 * mirrored + 1) * half)
    rows = torch.cat([head, _Mirrored.of(tail, shards)], 2)
    tiles = _tiles_of_slices(order, lengths, key.shape[2], firsts, half, is_causal=is_causal)
    out = call_function(_TiledAttention, rows, key, value, tiles, scale)
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


def _documents(ids: Tensor, like: Tensor, *, is_sorted: bool) -> tuple[Tensor, list[int]]:
    """The tokens ``[batch * tokens]`` by document, in their order in each, by number; and how many each one has."""
    batch, tokens = like.shape[0], like.shape[2]
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


def _tiles_of_slices(
    order: Tensor, lengths: Sequence[int], tokens: int, firsts: Iterable[int], half: int, *, is_causal: bool
) -> list[_Tiles]:
    """Tiles for two slices of `half` rows each, which begin at `firsts` in a row of so many `tokens`.

    What a slice has of a document are neighbours in it, as documents are in the order of their tokens.
    """
    found: dict[tuple[int, int, bool], list[tuple[Tensor, Tensor]]] = {}

    def add(rows: Tensor, columns: Tensor, *, is_causal: bool) -> None:
        found.setdefault((len(rows), len(columns), is_causal), []).append((rows, columns))

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
            if not is_causal:
                add(rows, document, is_causal=False)
                continue
            add(rows, own, is_causal=True)
            if before:
                add(rows, document[:before], is_causal=False)
    return [
        _Tiles(torch.stack([rows for rows, _ in each]), torch.stack([columns for _, columns in each]), causal)
        for (*_, causal), each in found.items()
    ]


def _count(which: Tensor, lengths: Sequence[int]) -> list[int]:
    """How many of each document's tokens are marked."""
    sums = torch.cat([which.new_zeros(1, dtype=torch.int64), which.cumsum(0)])
    ends = torch.tensor([0, *lengths], device=which.device).cumsum(0)
    return cast("Any", sums[ends].diff()).tolist()


# ---------------------------------------------------------------- how they are computed


def _takes_varlen(query: Tensor, value: Tensor) -> bool:
    is_narrow = query.dtype in (torch.float16, torch.bfloat16)
    size = query.shape[-1]
    return (
        query.device.type == "cuda" and is_narrow and size == value.shape[-1] <= _VARLEN_MOST
        and size % _VARLEN_UNIT == 0
    )  # fmt: skip


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    order: Tensor | None,
    lengths: list[int],
    scale: float,
    *,
    is_causal: bool,
) -> Tensor:
    """All documents in one call; `order` as in `_documents`, None if that is how they are."""
    batch, heads, tokens, _ = query.shape
    ends = torch.tensor([0, *lengths]).cumsum(0).to(query.device, torch.int32)
    q, k, v = (_tokens(x) if order is None else _tokens(x).index_select(0, order) for x in (query, key, value))
    out = varlen_attn(
        q, k, v, ends, ends, max(lengths), max(lengths), scale=scale, enable_gqa=key.shape[1] != heads,
        window_size=(-1, 0) if is_causal else (-1, -1),
    )  # fmt: skip
    assert isinstance(out, Tensor)
    if order is not None:
        out = torch.empty_like(out).index_copy(0, order, out)
    return out.view(batch, tokens, heads, -1).transpose(1, 2)


def _tokens(x: Tensor) -> Tensor:
    """``[batch, heads, tokens, size]`` as ``[batch * tokens, heads, size]``."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _picked(x: Tensor, tokens: Tensor) -> Tensor:
    """Of ``[all tokens, heads, size]`` those of tiles ``[tiles, tokens]``, as ``[tiles, heads, tokens, size]``."""
    return x[tokens].transpose(1, 2)


class _TiledAttention(torch.autograd.Function):
    """Attention of tiles, which are joined where they have rows in common; saves its operands, result, and a number
    for each row and head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: list[_Tiles], scale: float) -> Tensor:
        q, k, v = map(_tokens, (query, key, value))
        wide = sum_dtype(query)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        log_sum = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for rows, columns, is_causal in tiles:
            block = attend_block(_picked(q, rows), _picked(k, columns), _picked(v, columns), scale, is_causal=is_causal)
            before = Block(_picked(out, rows), log_sum[rows].transpose(1, 2))
            block = join_blocks(before, Block(block.out, block.log_sum.to(wide)))
            out[rows] = block.out.transpose(1, 2)
            log_sum[rows] = block.log_sum.transpose(1, 2)
        result = out.view(query.shape[0], query.shape[2], *out.shape[1:]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.tiles, ctx.scale = tiles, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *operands, out, log_sum = ctx.saved_tensors
        q, k, v, whole, incoming = map(_tokens, (*operands, out, gradients[0]))
        found = tuple(map(torch.zeros_like, (q, k, v)))
        for rows, columns, is_causal in ctx.tiles:
            parts = block_gradients(
                _picked(incoming, rows), _picked(q, rows), _picked(k, columns), _picked(v, columns),
                Block(_picked(whole, rows), log_sum[rows].transpose(1, 2).contiguous()), ctx.scale, is_causal=is_causal,
            )  # fmt: skip
            for total, tokens, part in zip(found, (rows, columns, columns), parts, strict=True):
                total.index_add_(0, tokens.reshape(-1), part.transpose(1, 2).reshape(-1, *total.shape[1:]))
        shaped = (
            x.view(like.shape[0], like.shape[2], *x.shape[1:]).transpose(1, 2)
            for x, like in zip(found, operands, strict=True)
        )
        for_query, for_key, for_value = shaped
        return for_query, for_key, for_value, None, None
