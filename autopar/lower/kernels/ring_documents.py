"""Attention of documents in one row whose queries, keys and values are all cut into slices of rows, one per device.

A document that lies in one slice, and is short beside it, is computed where it is, and nothing of it is sent.  Any
other is shared out among all devices: of 2 n chunks of it, device j gets numbers j and 2 n - 1 - j, so that causal
work is equal, document by document (head-tail balance).  Its keys and values then go round a ring, as those of one
long row do (`autopar.lower.kernels.ring_attention`), its results go back to where their rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.rings import passing, terms_of_passing
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import Block, packed, score_scale, sum_dtype, unpacked
from autopar.lower.kernels.attention_tiles import (
    Tiles,
    add_tile_gradients,
    add_tiles,
    joined_tiles,
    rows_of,
    tokens_of,
)
from autopar.lower.kernels.document_attention import document_order

__all__ = ["ring_documents"]

_SHORT = 2
"""A document that takes less than one part of a slice in so many stays where it is: the work of its rows is at most a
quarter of that of the longest one that would fit in, and sharing it out would send all of it."""


def ring_documents(  # noqa: PLR0913  (its arguments)
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
    """`document_attention` of this device's rows to all columns of their documents, of which it has as many.

    Communicates on the one axis of `shards`, of documents that are shared out alone: forward operands to where they are
    computed, keys and values round the ring, results back; backward the gradients of results, keys and values and their
    gradients round the ring, and gradients of operands back.

    Args:
        shards: of the rows and columns.
        query: ``[batch, heads, rows, size]``, this device's slice.
        key: ``[batch, heads or fewer, rows, size]``, likewise.
        value: likewise.
        ids: of all tokens, whole; see `document_attention`, likewise all others.
        scale: see `ids`.
        is_causal: see `ids`.
        is_sorted: see `ids`.
        length: see `ids`.
        window: 0.
    """
    del length
    if len(shards.axes) > 1 or window:
        raise ValueError("ring_documents runs on one axis, without a window")
    order, lengths = document_order(ids, query.shape[0], query.shape[2] * shards.count, is_sorted=is_sorted)
    places = _Places(order.cpu(), tuple(lengths), shards, query.shape[2], is_causal)
    return call_function(_RingDocuments, query, key, value, places, score_scale(query, scale))


@dataclass(frozen=True, eq=False)
class _Places:
    """Which tokens are computed where.  All devices know the same.

    Args:
        order: the tokens by document, numbered along the batch, in rows of as many as all devices have together.
        lengths: of the documents.
        shards: of the rows.
        rows: that a device has of each row of the batch.
        is_causal: whether tokens see none that come after them.
    """

    order: Tensor
    lengths: tuple[int, ...]
    shards: Shards
    rows: int
    is_causal: bool

    @property
    def count(self) -> int:
        """Devices."""
        return self.shards.count

    @cached_property
    def _owners(self) -> Tensor:
        """The device that has each token of `order`."""
        return self.order % (self.rows * self.count) // self.rows

    def _counted(self, owners: Tensor) -> list[int]:
        """How often each device is among these."""
        return cast("list[int]", cast("Any", torch.bincount(owners, minlength=self.count)).tolist())

    def _at_owner(self, tokens: Tensor) -> Tensor:
        """The numbers of tokens at the device that has them."""
        row, place = tokens // (self.rows * self.count), tokens % (self.rows * self.count)
        return row * self.rows + place % self.rows

    @cached_property
    def _split(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(first place in `order`, length): of documents that stay here; and of all that are shared out."""
        own, shared = list[tuple[int, int]](), list[tuple[int, int]]()
        owners = cast("list[int]", cast("Any", self._owners).tolist())
        at = 0
        for length in self.lengths:
            first = owners[at]
            if first != owners[at + length - 1] or length * _SHORT > self.rows:
                shared.append((at, length))
            elif first == self.shards.index:
                own.append((at, length))
            at += length
        return own, shared

    @cached_property
    def local_tiles(self) -> list[Tiles]:
        """Of the documents that stay here, by rows of this device."""
        documents = (self._at_owner(self.order[at : at + length]) for at, length in self._split[0])
        return joined_tiles((tokens, tokens, self.is_causal) for tokens in documents)

    @property
    def has_shared(self) -> bool:
        """Whether any document is shared out."""
        return bool(self._split[1])

    def _cuts(self, length: int) -> list[int]:
        """Where the chunks of a document begin, and its end."""
        return [number * length // (2 * self.count) for number in range(2 * self.count + 1)]

    @cached_property
    def _sizes(self) -> list[list[tuple[int, int]]]:
        """Per device and shared document, tokens of its first chunk and of its second one."""
        cuts = [self._cuts(length) for _, length in self._split[1]]
        ends = 2 * self.count
        return [[(own[j + 1] - own[j], own[ends - j] - own[ends - j - 1]) for own in cuts] for j in range(self.count)]

    def _tokens(self, device: int) -> Tensor:
        """The places in `order` of what a device computes of shared documents, document by document."""
        parts: list[Tensor] = []
        for at, length in self._split[1]:
            cuts = self._cuts(length)
            for chunk in (device, 2 * self.count - 1 - device):
                parts.append(torch.arange(at + cuts[chunk], at + cuts[chunk + 1]))
        return torch.cat(parts)

    @cached_property
    def num_computed(self) -> list[int]:
        """Per device, tokens of shared documents that it computes."""
        return [sum(first + second for first, second in each) for each in self._sizes]

    @cached_property
    def given(self) -> tuple[Tensor, list[int]]:
        """The rows of this device that are computed elsewhere or here as shared ones, by where; and how many each."""
        me = self.shards.index
        found: list[Tensor] = []
        for device in range(self.count):
            tokens = self._tokens(device)
            found.append(self._at_owner(self.order[tokens[self._owners[tokens] == me]]))
        return torch.cat(found), [len(each) for each in found]

    @cached_property
    def taken(self) -> tuple[Tensor, list[int]]:
        """Where what this device gets goes among what it computes, by the device that gives it; and how many each."""
        owners = self._owners[self._tokens(self.shards.index)]
        return torch.argsort(owners, stable=True), self._counted(owners)

    def tiles(self, source: int) -> list[Tiles]:
        """What this device computes with keys and values of the device `source`, by their numbers at both."""
        me = self.shards.index
        found: list[tuple[Tensor, Tensor, bool]] = []
        at = there = 0
        for (head, tail), (first, second) in zip(self._sizes[me], self._sizes[source], strict=True):
            rows, columns = range(at, at + head + tail), range(there, there + first + second)
            at, there = rows.stop, columns.stop
            is_square = self.is_causal and source == me
            if self.is_causal and source < me:
                columns = columns[:first]
            elif self.is_causal and source > me:
                rows = rows[head:]
            if rows and columns:
                found.append((_numbers(rows), _numbers(columns), is_square))
        return joined_tiles(found)


def _numbers(places: range) -> Tensor:
    return torch.arange(places.start, places.stop)


def _on(device: torch.device, tiles: Sequence[Tiles]) -> list[Tiles]:
    return [Tiles(rows.to(device), columns.to(device), is_causal) for rows, columns, is_causal in tiles]


@dataclass(frozen=True, eq=False)
class _Shared:
    """Moves between where rows are and where they are computed."""

    places: _Places
    device: torch.device

    def there(self, x: Tensor) -> Tensor:
        """Of ``[rows of this device, ...]`` what is computed here, from everywhere."""
        rows, sent = self.places.given
        order, received = self.places.taken
        came = self._exchange(x[rows.to(self.device)], sent, received)
        return torch.empty_like(came).index_copy_(0, order.to(self.device), came)

    def back(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this device, and what was computed of them anywhere."""
        rows, sent = self.places.given
        order, received = self.places.taken
        return rows.to(self.device), self._exchange(x[order.to(self.device)], received, sent)

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        shards = self.places.shards
        if not shards.axes:
            return x
        return shards.communicator.start_exchange_rows(x, shards.axes[0], sent, received).wait()

    def padded(self, x: Tensor) -> Tensor:
        """With as many rows as the device has that computes most, for all slices that travel are as long."""
        most = max(self.places.num_computed)
        return x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])


class _RingDocuments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: _Places, scale: float) -> Tensor:
        q, k, v = map(tokens_of, (query, key, value))
        wide, shared = sum_dtype(query), _Shared(places, query.device)
        out = q.new_zeros(*q.shape[:2], v.shape[2])
        log_sum = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        add_tiles(Block(out, log_sum), (q, k, v), _on(q.device, places.local_tiles), scale)
        kept: list[Tensor] = []
        if places.has_shared:
            moved = shared.there(q)
            keys, values = shared.padded(shared.there(k)), shared.padded(shared.there(v))
            total = Block(
                moved.new_zeros(*moved.shape[:2], v.shape[2], dtype=wide),
                moved.new_full(moved.shape[:2], -torch.inf, dtype=wide),
            )
            for source, held in passing(places.shards, packed(keys, values)):
                columns = unpacked(held, keys, values)
                add_tiles(total, (moved, *columns), _on(q.device, places.tiles(source)), scale)
            result = total.out.to(query.dtype)
            rows, found = shared.back(result)
            out[rows] = found
            kept = [moved, keys, values, result, total.log_sum]
        whole = rows_of(out, query)
        ctx.save_for_backward(query, key, value, whole, log_sum, *kept)
        ctx.places, ctx.scale = places, scale
        return whole

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, log_sum, *kept = ctx.saved_tensors
        places: _Places = ctx.places
        q, k, v, whole, incoming = map(tokens_of, (query, key, value, out, gradients[0]))
        found = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        tiles = _on(q.device, places.local_tiles)
        add_tile_gradients(found, incoming, (q, k, v), Block(whole, log_sum), tiles, ctx.scale)
        if places.has_shared:
            for total, (rows, terms) in zip(found, _shared_gradients(ctx, incoming, kept), strict=True):
                total[rows] = terms
        for_query, for_key, for_value = map(rows_of, found, (query, key, value))
        return for_query, for_key, for_value, None, None


def _shared_gradients(ctx: Any, incoming: Tensor, kept: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Of queries, keys and values, the rows of this device that are shared out, with their gradients."""
    places: _Places = ctx.places
    q, keys, values, result, log_sum = kept
    shared, wide = _Shared(places, q.device), sum_dtype(q)
    gradient = shared.there(incoming)
    for_q = torch.zeros_like(q, dtype=wide)

    def terms(source: int, held: Tensor) -> Tensor:
        columns = unpacked(held, keys, values)
        own = tuple(torch.zeros_like(x, dtype=wide) for x in (keys, values))
        tiles = _on(q.device, places.tiles(source))
        add_tile_gradients((for_q, own[0], own[1]), gradient, (q, *columns), Block(result, log_sum), tiles, ctx.scale)
        return packed(*own)

    for_keys, for_values = unpacked(terms_of_passing(places.shards, packed(keys, values), terms), keys, values)
    count = len(q)
    return [shared.back(x.to(q.dtype)) for x in (for_q, for_keys[:count], for_values[:count])]
