"""Attention of tiles: some rows to some columns each, by their numbers, joined where tiles have rows in common.

Documents in one row and windows along it are made of such tiles; those of one shape are one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from autopar.lower.autograd import call_function
from autopar.lower.kernels.attention_blocks import Block, attend_block, block_gradients, empty_block, join_blocks

__all__ = [
    "Band", "Tiles", "add_tile_gradients", "add_tiles", "attend_tiles", "attend_varlen", "band_parts", "joined_tiles",
    "numbers", "rows_of", "takes_varlen", "tiles_on", "tokens_of",
]  # fmt: skip

_VARLEN_MOST, _VARLEN_UNIT = 256, 8
"""The largest head of torch's attention of variable lengths, and the number that its size must be a multiple of."""
_VARLEN_TAKES_FEWER_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not before torch 2.12


class Tiles(NamedTuple):
    """Tiles of one shape: the tokens of queries ``[tiles, rows]`` and of keys ``[tiles, columns]``, by number.

    `is_causal`: there are as many columns as rows, and each row sees those up to its own.
    """

    rows: Tensor
    columns: Tensor
    is_causal: bool


def attend_tiles(query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[Tiles], scale: float) -> Tensor:
    """Attention ``[batch, heads, rows, size]`` of each row to the columns that `tiles` give it, each once.

    Args:
        query: ``[batch, heads, rows, size]``; numbers of rows count along the batch.
        key: ``[batch, heads or fewer, columns, size]``, likewise.
        value: see `key`.
        tiles: together all rows.
        scale: of the scores.
    """
    return call_function(_TiledAttention, query, key, value, tiles, scale)


def joined_tiles(parts: Iterable[tuple[Tensor, Tensor, bool]]) -> list[Tiles]:
    """Parts ``(rows, columns, is_causal)`` as tiles, those of one shape together."""
    by_size: dict[tuple[int, int, bool], list[tuple[Tensor, Tensor]]] = {}
    for rows, columns, is_causal in parts:
        by_size.setdefault((len(rows), len(columns), is_causal), []).append((rows, columns))
    return [
        Tiles(torch.stack([rows for rows, _ in each]), torch.stack([columns for _, columns in each]), causal)
        for (*_, causal), each in by_size.items()
    ]


class Band(NamedTuple):
    """What is seen in rows of `tokens`: of the rows from number `first` on, the columns from `low` on are at hand."""

    tokens: int
    window: int
    is_causal: bool
    first: int = 0
    low: int = 0


_Part = tuple[range, range, bool]


def band_parts(band: Band, rows: int) -> list[list[_Part]]:
    """Rows, columns and whether causal, of tiles; no row is twice in one list."""
    stop, last = band.first + rows, band.tokens - 1
    parts_before = [*_before(band.first, stop, band.window, is_strict=False)]
    if not band.is_causal:  # what comes after is what comes before, seen from the other end
        for parts in _before(band.tokens - stop, band.tokens - band.first, band.window, is_strict=True):
            parts_before.append(
                [(_mirrored(own, last), _mirrored(seen, last), is_causal) for own, seen, is_causal in parts]
            )
    return parts_before


def _mirrored(places: range, last: int) -> range:
    return range(last - places.start, last - places.stop, -places.step)


def _before(start: int, stop: int, window: int, *, is_strict: bool) -> tuple[list[_Part], list[_Part], list[_Part]]:
    """Rows from `start` to `stop` and the columns up to each that are less than `window` away; `is_strict`: before it.

    Rows are cut where a window would reach over the beginning: each part has its own square, causal; columns before it
    that all its rows see; and before these a corner, causal from the other end.
    """
    squares: list[_Part] = []
    shared: list[_Part] = []
    corners: list[_Part] = []
    cuts = [start, *range((start // window + 1) * window, stop, window), stop]
    for low, high in pairwise(cuts):
        count, shift = high - low, int(is_strict)
        if count > shift:
            squares.append((range(low + shift, high), range(low, high - shift), True))
        first = max(0, low - window + 1)
        seen_by_all = first + count - 1 if high > window else first
        if seen_by_all < low:
            shared.append((range(low, high), range(seen_by_all, low), False))
        if high > window and count > 1:
            corners.append((range(high - 2, low - 1, -1), range(first + count - 2, first - 1, -1), True))
    return squares, shared, corners


def numbers(places: range, shift: int = 0) -> Tensor:
    """The numbers of `places`, each `shift` more, for tiles."""
    return torch.arange(places.start, places.stop, places.step, device="cpu") + shift


def tiles_on(device: torch.device, tiles: Iterable[Tiles]) -> list[Tiles]:
    """The same tiles with their numbers on `device`."""
    return [Tiles(rows.to(device), columns.to(device), is_causal) for rows, columns, is_causal in tiles]


def takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's attention of variable lengths runs on tensors like these."""
    is_narrow = query.dtype in (torch.float16, torch.bfloat16)
    size = query.shape[-1]
    return (
        query.device.type == "cuda" and is_narrow and size == value.shape[-1] <= _VARLEN_MOST
        and size % _VARLEN_UNIT == 0
    )  # fmt: skip


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], most: tuple[int, int], scale: float,
    window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """torch's attention of variable lengths, with fewer heads of keys than of queries also where it takes none.

    Args:
        query: ``[tokens, heads, size]``.
        key: ``[tokens, heads or fewer, size]``.
        value: as `key`.
        ends: of queries and of keys, where the sequences end, int32, after a zero.
        most: the longest sequence of both.
        scale: of the scores.
        window_size: how many columns are seen before and after the one at a row's place; -1: all.
    """
    times = query.shape[1] // key.shape[1]
    attend: Any = varlen_attn
    if times > 1 and _VARLEN_TAKES_FEWER_HEADS:
        attend = partial(attend, enable_gqa=True)
    elif times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return attend(query, key, value, *ends, *most, scale=scale, window_size=window_size)


def tokens_of(x: Tensor) -> Tensor:
    """``[batch, heads, tokens, size]`` as ``[batch * tokens, heads, size]``."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def rows_of(tokens: Tensor, like: Tensor) -> Tensor:
    """The inverse of `tokens_of`, for a tensor with the batch and tokens of `like`."""
    return tokens.view(like.shape[0], like.shape[2], *tokens.shape[1:]).transpose(1, 2)


Operands = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each as `tokens_of` returns it."""


def add_tiles(total: Block, operands: Operands, tiles: Iterable[Tiles], scale: float) -> None:
    """Merge the attention of `tiles` into `total`, with tensors ``[tokens, heads, size]`` and ``[tokens, heads]``."""
    out, log_sum = total
    q, k, v = operands
    for rows, columns, is_causal in tiles:
        block = attend_block(_picked(q, rows), _picked(k, columns), _picked(v, columns), scale, is_causal=is_causal)
        before = Block(_picked(out, rows), log_sum[rows].transpose(1, 2))
        block = join_blocks(before, Block(block.out.to(out.dtype), block.log_sum.to(log_sum.dtype)))
        out[rows] = block.out.transpose(1, 2)
        log_sum[rows] = block.log_sum.transpose(1, 2)


def add_tile_gradients(
    totals: Operands, gradient: Tensor, operands: Operands, whole: Block, tiles: Iterable[Tiles], scale: float
) -> None:
    """Add the terms of `tiles` to the gradients of queries, keys and values.

    Args:
        totals: the gradients that are added to.
        gradient: of the result, ``[tokens, heads, size]``.
        operands: queries, keys and values.
        whole: the result over all columns and the logarithm of its sum of exponentials, as in `add_tiles`.
        tiles: the tiles to add, not necessarily with all columns.
        scale: of the scores.
    """
    q, k, v = operands
    for rows, columns, is_causal in tiles:
        parts = block_gradients(
            _picked(gradient, rows), _picked(q, rows), _picked(k, columns), _picked(v, columns),
            Block(_picked(whole.out, rows), whole.log_sum[rows].transpose(1, 2).contiguous()), scale,
            is_causal=is_causal,
        )  # fmt: skip
        for total, tokens, part in zip(totals, (rows, columns, columns), parts, strict=True):
            terms = part.transpose(1, 2).reshape(-1, *total.shape[1:])
            total.index_add_(0, tokens.reshape(-1), terms.to(total.dtype))


def _picked(x: Tensor, tokens: Tensor) -> Tensor:
    """Of ``[all tokens, heads, size]`` those of tiles ``[tiles, tokens]``, as ``[tiles, heads, tokens, size]``."""
    return x[tokens].transpose(1, 2)


class _TiledAttention(torch.autograd.Function):
    """Attention of tiles, which are joined where they have rows in common; saves its operands, result, and a number
    for each row and head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[Tiles], scale: float) -> Tensor:
        q, k, v = map(tokens_of, (query, key, value))
        out, log_sum = total = empty_block(q, v, q.dtype)
        add_tiles(total, (q, k, v), tiles, scale)
        result = rows_of(out, query)
        ctx.save_for_backward(query, key, value, result, log_sum)
        ctx.tiles, ctx.scale = tiles, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *operands, out, log_sum = ctx.saved_tensors
        q, k, v, whole, incoming = map(tokens_of, (*operands, out, gradients[0]))
        totals = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        add_tile_gradients(totals, incoming, (q, k, v), Block(whole, log_sum), ctx.tiles, ctx.scale)
        for_query, for_key, for_value = map(rows_of, totals, operands)
        return for_query, for_key, for_value, None, None
