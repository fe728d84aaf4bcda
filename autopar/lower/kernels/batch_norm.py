"""Batch normalization in training: on one device, and over a batch that is cut into equal slices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.channels import other_dims, per_channel, widened

__all__ = ["batch_norm", "sync_batch_norm"]

Normed = tuple[Tensor, Tensor | None, Tensor | None]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Normed:
    """Normalize each channel (dim 1) of `x` by its own statistics.

    Returns the result and the new running mean and variance (None where there is no old one); nothing is
    written to.
    """
    mean = None if running_mean is None else running_mean.detach().clone()
    var = None if running_var is None else running_var.detach().clone()
    if mean is not None and mean.dtype != x.dtype:  # torch takes parameters in one dtype with statistics only
        weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
    y = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True, momentum=momentum, eps=eps)
    return y, mean, var


def sync_batch_norm(
    shards: Shards,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Normed:
    """`batch_norm` of the whole batch, of which this device holds a slice.

    Statistics are whole on every device.

    Communicates an all-reduce of two numbers per channel on each axis of `shards`, forward and backward; float32, or
    float64 for float64 `x`.  The gradients of `weight` and `bias` are terms (``B``).

    Args:
        shards: of the batch or a spatial dim of `x`.
        x: ``[batch, channels, ...]``, this device's equal slice.
        weight: per channel, or None.
        bias: per channel, or None.
        running_mean: per channel, or None.
        running_var: per channel, or None.
        momentum: share of the batch's statistics in the new running ones.
        eps: added to the variance.
    """
    operands = (x, weight, bias, running_mean)
    y, mean, var = call_function(_SyncBatchNorm, *operands, shards, eps)
    count = _num_per_channel(x) * shards.count
    unbiased = var * (count / max(count - 1, 1))
    return y, _blend(running_mean, mean, momentum), _blend(running_var, unbiased, momentum)


def _blend(running: Tensor | None, fresh: Tensor, momentum: float) -> Tensor | None:
    return None if running is None else torch.lerp(running, fresh.to(running.dtype), momentum)


def _num_per_channel(x: Tensor) -> int:
    return x.numel() // x.shape[1]


class _SyncBatchNorm(torch.autograd.Function):
    """Returns the result, the mean and the biased variance of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        shards: Shards,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = widened(x)
        mean, var = _whole_statistics(wide, running_mean, shards)
        scale = (var + eps).rsqrt()
        gain = scale if weight is None else scale * weight
        normed = wide.sub(per_channel(mean, x)).mul_(per_channel(gain, x))
        if bias is not None:
            normed += per_channel(bias, x)
        ctx.save_for_backward(x, mean, scale, *(() if weight is None else (weight,)))
        ctx.shards, ctx.has_bias = shards, bias is not None
        ctx.mark_non_differentiable(mean, var)
        return normed.to(x.dtype), mean, var

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, mean, scale, *weights = ctx.saved_tensors
        g = gradients[0].to(mean.dtype)
        centered = x.to(mean.dtype) - per_channel(mean, x)
        dims = other_dims(x)
        own = torch.stack([g.sum(dims), (g * centered).sum(dims)])
        whole = ctx.shards.all_reduce(own / (_num_per_channel(x) * ctx.shards.count))
        gain = scale * weights[0] if weights else scale
        centered.mul_(per_channel(-scale * scale * whole[1], x)).add_(g).sub_(per_channel(whole[0], x))
        gradient = centered.mul_(per_channel(gain, x)).to(x.dtype)
        for_weight = (own[1] * scale).to(weights[0].dtype) if weights else None
        return gradient, for_weight, own[0] if ctx.has_bias else None, None, None, None


def _whole_statistics(x: Tensor, running_mean: Tensor | None, shards: Shards) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel over all slices, in one all-reduce per axis.

    The moments that are summed are about a point that every device knows, the running mean: about zero, a
    large mean would cancel the variance.  What is not finite in it, after a bad batch, must not reach this one.
    """
    dims = other_dims(x)
    var, mean = torch.var_mean(x, dims, correction=0)
    about = torch.zeros_like(mean) if running_mean is None else running_mean.to(mean.dtype).nan_to_num(0.0, 0.0, 0.0)
    offset = mean - about
    moments = shards.all_reduce(torch.stack([offset, var + offset * offset]) / shards.count)
    return about + moments[0], (moments[1] - moments[0] * moments[0]).clamp_(min=0.0)
