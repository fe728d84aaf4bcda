"""A statistic of the batch, on one device and of terms that devices have."""

from __future__ import annotations

from torch import Tensor

from autopar.lower.communication.shards import Shards

__all__ = ["batch_statistic", "sum_statistic"]


def batch_statistic(x: Tensor, times: int) -> Tensor:
    """`times` `x`, outside of autograd."""
    return x.detach() * times if times != 1 else x.detach()


def sum_statistic(shards: Shards, x: Tensor, times: int) -> Tensor:
    """`batch_statistic` of the sum of all devices' terms, whole on each of them: an all-reduce on each axis."""
    total = x.detach()
    for axis in shards.axes:
        total = shards.communicator.all_reduce(total, axis)
    return batch_statistic(total, times)
