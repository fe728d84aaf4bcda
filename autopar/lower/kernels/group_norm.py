"""Group normalization of images and videos that are split in space."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.channels import other_dims, per_channel, widened

__all__ = ["space_group_norm"]


def space_group_norm(
    shards: Shards,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``group_norm`` of this device's slice of `x` in a spatial dim, by the statistics of the whole.

    Communicates two all-reduces of a number for each row of the batch and group on each axis of `shards`, and backward,
    if `x` has a gradient, one of two numbers; float32, or float64 for float64 `x`.  The gradients of `weight` and
    `bias` are terms (``B``).

    Args:
        shards: of a spatial dim of `x`.
        x: ``[batch, channels, ...]``, this device's equal slice.
        num_groups: how many groups the channels form.
        weight: per channel, or None.
        bias: per channel, or None.
        eps: added to the variance.
        cudnn_enabled: without effect, as in torch.
    """
    del cudnn_enabled
    return call_function(_SpaceGroupNorm, x, weight, bias, shards, num_groups, eps)


class _SpaceGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shards: Shards,
        num_groups: int,
        eps: float,
    ) -> Tensor:
        groups = _in_groups(widened(x), num_groups)
        var, mean = torch.var_mean(groups, 2, correction=0)
        whole_mean = shards.all_reduce(mean / shards.count)
        # Moments about the mean: those about zero would cancel where the mean is large.
        whole_var = shards.all_reduce((var + (mean - whole_mean).square()) / shards.count)
        mean, scale = whole_mean, (whole_var + eps).rsqrt()
        normed = ((groups - mean[..., None]) * scale[..., None]).view(x.shape)
        if weight is not None:
            normed = normed * per_channel(weight, x)
        if bias is not None:
            normed = normed + per_channel(bias, x)
        ctx.save_for_backward(x, mean, scale, *(() if weight is None else (weight,)))
        ctx.shards, ctx.num_groups, ctx.bias_dtype = shards, num_groups, None if bias is None else bias.dtype
        return normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, mean, scale, *weights = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        normed = (_in_groups(x.to(mean.dtype), ctx.num_groups) - mean[..., None]) * scale[..., None]
        dims = other_dims(x)
        for_bias = gradient.sum(dims).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        for_weight = (gradient * normed.view(x.shape)).sum(dims).to(weights[0].dtype) if weights else None
        if not ctx.needs_input_grad[0]:
            return None, for_weight, for_bias, None, None, None
        inner = gradient * per_channel(weights[0], x) if weights else gradient
        inner = _in_groups(inner, ctx.num_groups)
        own = torch.stack([inner.sum(2), (inner * normed).sum(2)])
        whole = ctx.shards.all_reduce(own / (inner.shape[2] * ctx.shards.count))
        for_x = (inner - whole[0][..., None] - normed * whole[1][..., None]) * scale[..., None]
        return for_x.view(x.shape).to(x.dtype), for_weight, for_bias, None, None, None


def _in_groups(x: Tensor, num_groups: int) -> Tensor:
    """``[batch, groups, elements of a group]``."""
    return x.reshape(x.shape[0], num_groups, -1)
