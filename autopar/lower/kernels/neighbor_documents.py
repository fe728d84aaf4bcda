"""Sliding-window attention in rows of several documents, with queries, keys and values split along the rows."""

from __future__ import annotations

from torch import Tensor

from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import score_scale
from autopar.lower.kernels.attention_tiles import Band, Tiles, attend_tiles, band_parts, joined_tiles, numbers, tiles_on
from autopar.lower.kernels.document_attention import document_order
from autopar.lower.kernels.window_attention import with_previous

__all__ = ["neighbor_documents"]


def neighbor_documents(  # noqa: PLR0913  (its arguments)
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
    """`document_attention`, causal, with a window and sorted documents, for this device's slice of all operands.

    It communicates as `neighbor_windows` does: in forward each device sends the last ``window - 1`` rows of `key` and
    `value` to the next device, in backward their gradients return.

    Args:
        shards: of the rows, on one axis.
        query: ``[batch, heads, rows, size]``, this device's slice of at least ``window - 1`` rows.
        key: ``[batch, heads or fewer, rows, size]``, the same slice.
        value: as `key`.
        ids: of all tokens, not split; see `document_attention` for it and the arguments after it.
        is_causal: True.
        is_sorted: True.
        window: at least 1.

    Raises:
        ValueError: a call that the kernel doesn't support.
    """
    del length
    batch, rows = query.shape[0], query.shape[2]
    if len(shards.axes) > 1 or not (is_causal and is_sorted) or not 0 < window <= rows + 1:
        raise ValueError(
            "neighbor_documents is causal, on one axis, of documents in order, with a window that reaches no further "
            "than a slice"
        )
    tokens, first = rows * shards.count, shards.index * rows
    key, value = with_previous(shards, key, value, window - 1)
    _, lengths = document_order(ids, batch, tokens, is_sorted=True)
    tiles = _tiles(lengths, tokens, range(first, first + rows), key.shape[2], window)
    return attend_tiles(query, key, value, tiles_on(query.device, tiles), score_scale(query, scale))


def _tiles(lengths: list[int], tokens: int, own: range, num_columns: int, window: int) -> list[Tiles]:
    """The tiles of the rows `own` of each entry of the batch, with the last `num_columns` columns up to their end.

    Entries have `tokens` each; documents are listed in order along the batch, and none continues in the next entry.
    """
    bands: dict[int, list[tuple[Tensor, Tensor, bool]]] = {}
    at = 0
    for length in lengths:
        entry, begin = divmod(at, tokens)
        at += length
        start, stop = max(begin, own.start), min(begin + length, own.stop)
        if start >= stop:
            continue
        to_row = entry * len(own) + begin - own.start
        to_column = entry * num_columns + begin - (own.stop - num_columns)
        for place, part in enumerate(band_parts(Band(length, window, True, start - begin), stop - start)):
            bands.setdefault(place, []).extend(
                (numbers(rows, to_row), numbers(seen, to_column), is_causal) for rows, seen, is_causal in part
            )
    return [tile for each in bands.values() for tile in joined_tiles(each)]
