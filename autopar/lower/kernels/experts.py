"""Experts that are cut into slices, one per device: each with the rows of all devices, or with those that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards

__all__ = ["dispatched_experts", "masked_experts"]

_ops: Any = torch.ops


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
    """The rows of this device's experts, zeros for all others; the sum over `shards` is the result.

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


def dispatched_experts(
    shards: Shards,
    ids: Tensor,
    reads: Sequence[Tensor],
    experts: Sequence[Tensor],
    others: Sequence[Tensor],
    members: Tensor,
    num_experts: int,
    body: str,
) -> Tensor:
    """This device's rows, each sent to the device that has its expert, and its result sent back.

    No row is dropped.  Between any two devices travel as many rows as the most that any device has for another: the
    devices agree on that number first, and the host waits for it.  Arguments are those of `masked_experts`; `members`
    are all experts.
    """
    num_own = num_experts // shards.count
    sorted_ids, order = torch.sort(ids, stable=True)
    owners = sorted_ids // num_own
    starts = torch.searchsorted(owners, torch.arange(shards.count + 1, device=ids.device))
    most = shards.all_reduce(starts.diff().max().view(1), "max")
    capacity = max(1, int(most))
    slots = owners * capacity + torch.arange(len(ids), device=ids.device) - starts[owners]

    def sent(x: Tensor, fill: int = 0) -> Tensor:
        buffer = x.new_full((shards.count * capacity, *x.shape[1:]), fill)
        return _exchange(shards, buffer.index_copy(0, slots, x[order // (len(ids) // len(x))]))

    there = sent(ids, fill=num_experts)
    local = (there - shards.index * num_own).masked_fill(there == num_experts, num_own)
    made = _ops.autopar_traced.experts(local, [sent(x) for x in reads], experts, others, members, num_experts, body)
    back = _exchange(shards, made)
    place_of = torch.empty_like(order).index_put((order,), slots)
    return back[place_of]


def _exchange(shards: Shards, x: Tensor) -> Tensor:
    """[devices * n, ...]: the n rows for each device go there, and those from each come; their gradients go back."""
    return call_function(_Exchange, x, shards) if x.is_floating_point() else _moved(x, shards)


def _moved(x: Tensor, shards: Shards) -> Tensor:
    sizes = [axis.size for axis in shards.axes]
    cut = x.reshape(*sizes, -1, *x.shape[1:])
    for dim, axis in enumerate(shards.axes):
        cut = shards.communicator.all_to_all(cut, axis, dim, dim)
    return cut.reshape(x.shape)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return _moved(x, shards)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None]:
        return _moved(gradients[0], ctx.shards), None
