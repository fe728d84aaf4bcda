"""Attention in rows of several documents, with queries, keys and values split along the rows.

A device computes a document locally if it lies in the device's slice and is short compared to the slice; nothing of it
is sent.  All other documents are shared out among the n devices: each is split into 2 n chunks, and device j computes
chunks j and 2 n - 1 - j, so that causal work is equal for every document (head-tail balance).  Keys and values of
shared documents travel round a ring, as those of one long row do (`autopar.lower.kernels.ring_attention`), and results
return to the devices that own their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.rings import passing, terms_of_passing
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.attention_blocks import Block, empty_block, packed, score_scale, sum_dtype, unpacked
from autopar.lower.kernels.attention_tiles import (
    Tiles,
    add_tile_gradients,
    add_tiles,
    joined_tiles,
    numbers,
    rows_of,
    tiles_on,
    tokens_of,
)
from autopar.lower.kernels.document_attention import document_order

__all__ = ["ring_documents"]

_SHORT = 2
"""A document is local if it is no longer than a slice divided by this: it then takes at most a quarter of the work of a
document as long as the slice, and sharing it out would send all of it.  Chosen by that count, not measured."""


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
    """`document_attention` without a window, for this device's slice of all operands.

    It communicates for shared documents only, on the axis of `shards`.  Forward: operands to the devices that compute
    them, keys and values round the ring, results back.  Backward: gradients of results to these devices, keys and
    values with their gradients round the ring, gradients of operands back.

    Args:
        shards: of the rows, on one axis.
        query: ``[batch, heads, rows, size]``, this device's slice.
        key: ``[batch, heads or fewer, rows, size]``, the same slice.
        value: as `key`.
        ids: of all tokens, not split; see `document_attention` for it and the arguments after it.
        window: 0.

    Raises:
        ValueError: a call that the kernel doesn't support.
    """
    del length
    if len(shards.axes) > 1 or window:
        raise ValueError("ring_documents runs on one axis, without a window")
    order, lengths = document_order(ids, query.shape[0], query.shape[2] * shards.count, is_sorted=is_sorted)
    places = _TokenPlaces(order.cpu(), tuple(lengths), shards, query.shape[2], is_causal)
    return call_function(_RingDocuments, query, key, value, places, score_scale(query, scale))


@dataclass(frozen=True, eq=False)
class _TokenPlaces:
    """Which device computes which tokens; every device derives the same answer.

    Args:
        order: the tokens sorted by document; token t of entry b of the batch has the number ``b * count * rows + t``.
        lengths: the tokens of each document.
        shards: of the rows.
        rows: tokens of each entry of the batch that one device owns.
        is_causal: whether tokens see none after themselves.
    """

    order: Tensor
    lengths: tuple[int, ...]
    shards: Shards
    rows: int
    is_causal: bool

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.shards.count

    @cached_property
    def _owners(self) -> Tensor:
        """The device that owns each token of `order`."""
        return self.order % (self.rows * self.count) // self.rows

    def _counted(self, owners: Tensor) -> list[int]:
        """How many of these tokens each device owns."""
        return cast("list[int]", cast("Any", torch.bincount(owners, minlength=self.count)).tolist())

    def _at_owner(self, tokens: Tensor) -> Tensor:
        """The indices of tokens among the rows of the device that owns them."""
        row, place = tokens // (self.rows * self.count), tokens % (self.rows * self.count)
        return row * self.rows + place % self.rows

    @cached_property
    def _split(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(first position in `order`, length) of this device's local documents, and of all shared documents."""
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
        """The tiles of this device's local documents, as indices of its rows."""
        documents = (self._at_owner(self.order[at : at + length]) for at, length in self._split[0])
        return joined_tiles((tokens, tokens, self.is_causal) for tokens in documents)

    @property
    def has_shared(self) -> bool:
        """Whether there are shared documents."""
        return bool(self._split[1])

    def _cuts(self, length: int) -> list[int]:
        """The positions where the chunks of a document begin, and its end."""
        return [number * length // (2 * self.count) for number in range(2 * self.count + 1)]

    @cached_property
    def _sizes(self) -> list[list[tuple[int, int]]]:
        """Per device and shared document, the numbers of tokens in the device's first and second chunk."""
        cuts = [self._cuts(length) for _, length in self._split[1]]
        ends = 2 * self.count
        return [[(own[j + 1] - own[j], own[ends - j] - own[ends - j - 1]) for own in cuts] for j in range(self.count)]

    def _tokens(self, device: int) -> Tensor:
        """The positions in `order` of the shared tokens that a device computes, document by document."""
        parts: list[Tensor] = []
        for at, length in self._split[1]:
            cuts = self._cuts(length)
            for chunk in (device, 2 * self.count - 1 - device):
                parts.append(numbers(range(cuts[chunk], cuts[chunk + 1]), at))
        return torch.cat(parts)

    @cached_property
    def num_computed(self) -> list[int]:
        """The number of shared tokens that each device computes."""
        return [sum(first + second for first, second in each) for each in self._sizes]

    @cached_property
    def given(self) -> tuple[Tensor, list[int]]:
        """This device's rows in shared documents, ordered by the device that computes them; and the count for each."""
        me = self.shards.index
        rows: list[Tensor] = []
        for device in range(self.count):
            tokens = self._tokens(device)
            rows.append(self._at_owner(self.order[tokens[self._owners[tokens] == me]]))
        return torch.cat(rows), [len(each) for each in rows]

    @cached_property
    def taken(self) -> tuple[Tensor, list[int]]:
        """The positions of received rows among the rows that this device computes, ordered by the device that sends
        them; and the count for each.
        """
        owners = self._owners[self._tokens(self.shards.index)]
        return torch.argsort(owners, stable=True), self._counted(owners)

    def tiles(self, source: int) -> list[Tiles]:
        """The tiles that this device computes with the keys and values of device `source`, as indices on each side."""
        me = self.shards.index
        tiles: list[tuple[Tensor, Tensor, bool]] = []
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
                tiles.append((numbers(rows), numbers(columns), is_square))
        return joined_tiles(tiles)


@dataclass(frozen=True, eq=False)
class _Shared:
    """Moves rows between the devices that own them and the devices that compute them."""

    places: _TokenPlaces
    device: torch.device

    def there(self, x: Tensor) -> Tensor:
        """Send ``[rows of this device, ...]``, and return what this device computes, in its order."""
        rows, sent = self.places.given
        order, received = self.places.taken
        came = self._exchange(x[rows.to(self.device)], sent, received)
        return torch.empty_like(came).index_copy_(0, order.to(self.device), came)

    def back(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send back what this device computed; returns indices of this device's rows, and their results."""
        rows, sent = self.places.given
        order, received = self.places.taken
        return rows.to(self.device), self._exchange(x[order.to(self.device)], received, sent)

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        shards = self.places.shards
        if not shards.axes:
            return x
        return shards.communicator.start_exchange_rows(x, shards.axes[0], sent, received).wait()

    def padded(self, x: Tensor) -> Tensor:
        """Pad to the rows of the device that computes most, since slices in a ring have equal sizes."""
        most = max(self.places.num_computed)
        return x if len(x) == most else torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])


class _RingDocuments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, places: _TokenPlaces, scale: float) -> Tensor:
        q, k, v = map(tokens_of, (query, key, value))
        shared = _Shared(places, query.device)
        out, log_sum = local = empty_block(q, v, q.dtype)
        add_tiles(local, (q, k, v), tiles_on(q.device, places.local_tiles), scale)
        kept: list[Tensor] = []
        if places.has_shared:
            moved = shared.there(q)
            keys, values = shared.padded(shared.there(k)), shared.padded(shared.there(v))
            total = empty_block(moved, values, sum_dtype(moved))
            for source, received in passing(places.shards, packed(keys, values)):
                columns = unpacked(received, keys, values)
                add_tiles(total, (moved, *columns), tiles_on(q.device, places.tiles(source)), scale)
            result = total.out.to(query.dtype)
            rows, results = shared.back(result)
            out[rows] = results
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
        places: _TokenPlaces = ctx.places
        q, k, v, whole, incoming = map(tokens_of, (query, key, value, out, gradients[0]))
        totals = (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        tiles = tiles_on(q.device, places.local_tiles)
        add_tile_gradients(totals, incoming, (q, k, v), Block(whole, log_sum), tiles, ctx.scale)
        if places.has_shared:
            for total, (rows, terms) in zip(totals, _shared_gradients(ctx, incoming, kept), strict=True):
                total[rows] = terms
        for_query, for_key, for_value = map(rows_of, totals, (query, key, value))
        return for_query, for_key, for_value, None, None


def _shared_gradients(ctx: Any, incoming: Tensor, kept: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """For queries, keys and values: the indices of this device's rows in shared documents, and their gradients."""
    places: _TokenPlaces = ctx.places
    q, keys, values, result, log_sum = kept
    shared, wide = _Shared(places, q.device), sum_dtype(q)
    gradient = shared.there(incoming)
    for_q = torch.zeros_like(q, dtype=wide)

    def terms(source: int, received: Tensor) -> Tensor:
        columns = unpacked(received, keys, values)
        own = tuple(torch.zeros_like(x, dtype=wide) for x in (keys, values))
        tiles = tiles_on(q.device, places.tiles(source))
        add_tile_gradients((for_q, own[0], own[1]), gradient, (q, *columns), Block(result, log_sum), tiles, ctx.scale)
        return packed(*own)

    for_keys, for_values = unpacked(terms_of_passing(places.shards, packed(keys, values), terms), keys, values)
    count = len(q)
    return [shared.back(x.to(q.dtype)) for x in (for_q, for_keys[:count], for_values[:count])]
