"""Experts that are cut into slices, one per device: each with the rows of all devices, or with those that are sent."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.communication.tensor_in_flight import TensorInFlight
from autopar.ops.experts import read_body

__all__ = ["dispatched_experts", "masked_experts", "parts_of_dispatch"]

_ops: Any = torch.ops


Parts = Generator[None, None, Tensor]
"""A kernel that yields where others may compute, and returns its result."""


def masked_experts(
    shards: Shards,
    ids: Tensor,
    reads: Sequence[Tensor],
    experts: Sequence[Tensor],
    others: Sequence[Tensor],
    members: Tensor,
    num_experts: int,
    body: str,
) -> Tensor:
    """The rows of this device's experts (or their sums), zeros for all others; the sum over `shards` is the result.

    Args:
        shards: of the experts; nothing is communicated.
        ids: [R], the expert of each row.
        reads: of [R, ...], or [R / k, ...] for what the k rows of a token share.
        experts: of [experts of this device, ...].
        others: what all rows read.
        members: the experts of this device.
        num_experts: of all devices.
        body: see `autopar.ops.experts`.
    """
    num_members = len(members)
    local = ids - members[0]
    # Those of other devices come behind all that are here.
    local = local.masked_fill((local < 0) | (local >= num_members), num_members)
    return _ops.autopar_traced.experts(local, reads, experts, others, members, num_experts, body)


def dispatched_experts(shards: Shards, *arguments: Any) -> Tensor:
    """This device's tokens, each sent to the devices that have experts of it, and their results sent back.

    On several axes a token goes to each place on the outermost axis where it has experts, and from there on.  So it
    crosses the links between nodes once for each node, and its results there come back as one sum, as
    in arXiv 2412.19437, section 3.2.2.  Nothing is dropped.  On each axis as much travels
    between any two devices as the most that any device has for another: the devices agree on that number first, and
    the host waits for it.  Arguments are those of `masked_experts`; `members` are all experts.
    """
    return _whole(parts_of_dispatch(shards, *arguments))


def parts_of_dispatch(
    shards: Shards,
    ids: Tensor,
    reads: Sequence[Tensor],
    experts: Sequence[Tensor],
    others: Sequence[Tensor],
    members: Tensor,
    num_experts: int,
    body: str,
) -> Parts:
    """`dispatched_experts` in three parts, so that others compute while tokens travel.

    Yields once the tokens are on their way (on the outermost axis), and once their sums are on their way back.
    """
    summed, num_local = read_body(body).summed, len(experts[0])
    num_tokens = len(ids) // summed
    shared = [len(x) == num_tokens for x in reads]
    given = [x if once else _by_token(x, num_tokens, summed) for x, once in zip(reads, shared, strict=True)]

    def compute(ids: Tensor, given: Sequence[Tensor]) -> Tensor:
        token, place = (ids < num_local).nonzero(as_tuple=True)
        rows, order = torch.sort(ids[token, place], stable=True)
        token, place = token[order], place[order]
        is_empty = not len(rows)
        if is_empty:  # kernels need a row: one whose expert is elsewhere
            token = place = token.new_zeros(1)
            rows = token + num_local
        of_rows = [
            _picked(x, token) if once else _picked(x.flatten(0, 1), token * summed + place)
            for x, once in zip(given, shared, strict=True)
        ]
        made = _ops.autopar_traced.sorted_experts(rows, of_rows, experts, others, body, may_be_elsewhere=is_empty)
        return call_function(_Sums, made, torch.arange(len(rows), device=ids.device), token, len(ids))

    return (yield from _spread(shards, ids.view(num_tokens, summed), given, num_local, compute))


def _by_token(x: Tensor, num_tokens: int, summed: int) -> Tensor:
    """[tokens, summed, ...] of what every row has, or several rows share."""
    return x.repeat_interleave(num_tokens * summed // len(x), 0).view(num_tokens, summed, *x.shape[1:])


_Compute = Callable[[Tensor, Sequence[Tensor]], Tensor]


def _spread(shards: Shards, ids: Tensor, reads: Sequence[Tensor], num_local: int, compute: _Compute) -> Parts:
    """[tokens, ...]: the sums of what `compute` makes of the tokens on each of `shards` that has experts of them.

    Yields while tokens are on their way to the places on the outermost axis, and on their way back.

    Args:
        shards: of the experts, which have `num_local` each.
        ids: [tokens, k], the experts of each token, from 0 for the first one of `shards`; those from the number of
            their experts on are elsewhere.
        reads: of [tokens, ...].
        num_local: experts of one device.
        compute: given `ids` and `reads` of the tokens that come to this device.
    """
    if not shards.axes:  # one device has all experts: nothing travels, with the same pauses
        yield
        yield
        return compute(ids, reads)
    axis = shards.axes[0]
    inner = Shards(shards.communicator, shards.axes[1:])
    route = _Route.of(Shards(shards.communicator, (axis,)), ids, num_local * inner.count)
    sent_ids, sent = route.send_ids(ids), [route.send(x) for x in reads]
    yield
    made = _whole(_spread(inner, sent_ids.wait(), [each.wait() for each in sent], num_local, compute))
    back = route.start(made)
    yield
    return call_function(_Sums, back.wait(), route.slots, route.token, len(ids))


def _whole(parts: Parts) -> Tensor:
    """What these parts return, run in a row."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


@dataclass(frozen=True)
class _Route:
    """Which tokens go to which place on an axis.

    Args:
        shards: the places.
        num_local: experts of each.
        capacity: tokens that each place gets from each other, fillers included.
        to, token: [n], the place and the token of each of n copies.
        slots: [n], where it is in the buffer ``[places * capacity, ...]`` of what is sent.
    """

    shards: Shards
    num_local: int
    capacity: int
    to: Tensor
    token: Tensor
    slots: Tensor

    @classmethod
    def of(cls, shards: Shards, ids: Tensor, num_local: int) -> _Route:
        num_places = shards.count
        owners = (ids // num_local).clamp(max=num_places)
        goes = torch.zeros(len(ids), num_places + 1, dtype=torch.bool, device=ids.device).scatter(1, owners, True)
        goes = goes[:, :num_places].t()
        counts = goes.sum(1)
        capacity = max(1, int(shards.all_reduce(counts.max().view(1), "max")))
        to, token = goes.nonzero(as_tuple=True)
        starts = counts.cumsum(0) - counts
        slots = to * capacity + torch.arange(len(to), device=ids.device) - starts[to]
        return cls(shards, num_local, capacity, to, token, slots)

    def send_ids(self, ids: Tensor) -> TensorInFlight:
        """The experts of the tokens that come here, from 0 for the first one here, `num_local` for those elsewhere."""
        own = ids[self.token] - (self.to * self.num_local).unsqueeze(1)
        own = own.masked_fill((own < 0) | (own >= self.num_local), self.num_local)
        buffer = ids.new_full((self.shards.count * self.capacity, ids.shape[1]), self.num_local)
        return self.start(buffer.index_copy_(0, self.slots, own))

    def send(self, x: Tensor) -> TensorInFlight:
        """Of the tokens that come here, in the order of `send_ids`; fillers have the numbers of some token."""
        source = self.token.new_zeros(self.shards.count * self.capacity).index_copy_(0, self.slots, self.token)
        copies = call_function(_TokenCopies, x, source, self.slots, self.token) if x.is_floating_point() else x[source]
        return self.start(copies)

    def start(self, x: Tensor) -> TensorInFlight:
        """[places * capacity, ...]: the rows for each place go there, and those from each come."""
        (axis,) = self.shards.axes
        return TensorInFlight.exchanged(self.shards.communicator, x, axis)


def _picked(x: Tensor, source: Tensor) -> Tensor:
    """``x[source]``."""
    places = torch.arange(len(source), device=source.device)
    return call_function(_TokenCopies, x, source, places, source) if x.is_floating_point() else x[source]


class _TokenCopies(torch.autograd.Function):
    """``x[source]``; the gradient of each token is the sum of those of its copies, which are at `slots`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, slots: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(slots, token)
        ctx.num_tokens = len(x)
        return x[source]

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        slots, token = ctx.saved_tensors
        return _added(gradients[0], slots, token, ctx.num_tokens), None, None, None


class _Sums(torch.autograd.Function):
    """[tokens, ...]: for each token the sum of the rows of `made` that are at its `slots`, zero without any."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, slots: Tensor, token: Tensor, num_tokens: int) -> Tensor:
        source = token.new_zeros(len(made)).index_copy_(0, slots, token)
        ctx.save_for_backward(source)
        return _added(made, slots, token, num_tokens)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        # Fillers get some token's gradient, which nothing reads.
        return gradients[0][ctx.saved_tensors[0]], None, None, None


def _added(rows: Tensor, slots: Tensor, token: Tensor, num_tokens: int) -> Tensor:
    """[tokens, ...]: the sums of ``rows[slots]`` by `token`, in a fixed order, of 16-bit floats in float32."""
    order = torch.argsort(token, stable=True)
    counts = torch.zeros(num_tokens, dtype=torch.int64, device=token.device).index_add_(
        0, token, torch.ones_like(token)
    )
    flat = functional.embedding_bag(slots[order], rows.reshape(len(rows), -1), counts.cumsum(0) - counts, mode="sum")
    return flat.view(num_tokens, *rows.shape[1:])
