"""Attention of tiles: some rows to some columns each, by their numbers, joined where tiles have rows in common.

Documents in one row and windows along it are made of such tiles; those of one shape are one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.kernels.attention_blocks import Block, attend_block, block_gradients, join_blocks, sum_dtype

__all__ = ["Tiles", "attend_tiles", "joined_tiles", "takes_varlen", "tokens_of"]

_VARLEN_MOST, _VARLEN_UNIT = 256, 8
"""The largest head that torch's attention of variable lengths takes, and what its size divides by."""


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
    found: dict[tuple[int, int, bool], list[tuple[Tensor, Tensor]]] = {}
    for rows, columns, is_causal in parts:
        found.setdefault((len(rows), len(columns), is_causal), []).append((rows, columns))
    return [
        Tiles(torch.stack([rows for rows, _ in each]), torch.stack([columns for _, columns in each]), causal)
        for (*_, causal), each in found.items()
    ]


def takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's attention of variable lengths runs on tensors like these."""
    is_narrow = query.dtype in (torch.float16, torch.bfloat16)
    size = query.shape[-1]
    return (
        query.device.type == "cuda" and is_narrow and size == value.shape[-1] <= _VARLEN_MOST
        and size % _VARLEN_UNIT == 0
    )  # fmt: skip


def tokens_of(x: Tensor) -> Tensor:
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
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: Sequence[Tiles], scale: float) -> Tensor:
        q, k, v = map(tokens_of, (query, key, value))
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
        q, k, v, whole, incoming = map(tokens_of, (*operands, out, gradients[0]))
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
