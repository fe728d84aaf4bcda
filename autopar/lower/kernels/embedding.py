"""Embedding over a vocabulary that is cut into slices, one per device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards

__all__ = ["vocab_parallel_embedding"]


def vocab_parallel_embedding(
    shards: Shards,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``aten.embedding`` from this device's rows, zeros for others; the sum over all `shards` is the result.

    Args:
        shards: of dim 0 of `weight`; nothing is communicated.
        weight: this device's rows, ``[vocabulary / devices, width]``.
        indices: of the whole vocabulary, any shape.
        padding_idx: the row of the whole table that gets no gradient; -1 for none.
        scale_grad_by_freq: divide a row's gradient by how often it is read.
        sparse: accepted and ignored, the gradient is dense.
    """
    num_rows = weight.shape[0]
    places = (shards.index * num_rows, shards.count * num_rows)
    return call_function(_Embedding, weight, indices, places, padding_idx, scale_grad_by_freq)


class _Embedding(torch.autograd.Function):
    """Rows from `places[0]` on of a table with `places[1]` rows.

    What must not count reads one extra row, which gets no gradient.  An index that is in no slice of the table stays
    out of range, so that the lookup raises as on one device.
    """

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, places: tuple[int, int], padding_idx: int, scale_grad_by_freq: bool
    ) -> Tensor:
        num_rows, (first, total) = weight.shape[0], places
        local = indices - first
        is_elsewhere = ((local < 0) | (local >= num_rows)) & (indices >= 0) & (indices < total)
        rows = torch.nn.functional.embedding(local.masked_fill(is_elsewhere, 0), weight)
        rows.masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)
        without_gradient = is_elsewhere if padding_idx < 0 else is_elsewhere | (indices == padding_idx)
        ctx.save_for_backward(local.masked_fill_(without_gradient, num_rows))
        ctx.num_rows = num_rows
        ctx.scale_grad_by_freq = scale_grad_by_freq
        return rows

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        (local,) = ctx.saved_tensors
        extra = ctx.num_rows
        table = torch.ops.aten.embedding_dense_backward(
            gradients[0].contiguous(), local, extra + 1, extra, ctx.scale_grad_by_freq
        )
        return table[:extra], None, None, None, None
