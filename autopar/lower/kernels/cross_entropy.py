"""Cross entropy, whole, and over a vocabulary that is cut into slices, one per device.

With x the logits of one position, w the class weights (1 without), C the number of classes, y the target, s
the smoothing and ``log Z = log sum_c exp(x_c)``, the loss of a position that counts is

    (1 - s) w_y (log Z - x_y)  +  s / C sum_c w_c (log Z - x_c)

Each device sums over its own classes; x is taken relative to its maximum over all devices.  Backward needs no
communication: ``log Z`` is kept, and the softmax of the own classes is computed again from the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards

__all__ = ["cross_entropy", "cross_entropy_denominator", "vocab_parallel_cross_entropy"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    class_dim: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """Cross entropy of class indices, classes on `class_dim`: per position (``"none"``), or ``"sum"``.

    Thousands of terms don't add up in 16 bits: the sum is at least float32.
    """
    num_classes = logits.shape[class_dim]
    rows = torch.movedim(logits, class_dim, -1).reshape(-1, num_classes)
    is_narrow = logits.element_size() < 4
    losses = torch.nn.functional.cross_entropy(
        rows,
        target.reshape(-1),
        None if weight is None else weight.to(logits.dtype),  # a loss's own weights stay wide in mixed precision
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none" if is_narrow else reduction,
    )
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum(dtype=torch.float32) if is_narrow else losses


def cross_entropy_denominator(
    target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, num_classes: int = 0
) -> Tensor:
    """What mean cross entropy divides by: the number of targets that count, or the sum of their weights.

    A scalar, float32, or float64 for float64 weights.  `num_classes` is for rules only.
    """
    del num_classes
    counts = target != ignore_index
    if weight is None:
        return counts.sum(dtype=torch.float32)
    weights = weight.detach()[target.masked_fill(~counts, 0)]
    dtype = torch.float64 if weights.dtype is torch.float64 else torch.float32
    return weights.masked_fill(~counts, 0.0).sum(dtype=dtype)


def vocab_parallel_cross_entropy(
    shards: Shards,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    class_dim: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """``autopar.cross_entropy`` on this device's slice of the classes; the result is whole on every device.

    Communicates forward only: an all-reduce (max) of one number per position and an all-reduce (sum) of two,
    three with label smoothing, on each axis of `shards`; float32, or float64 for float64 logits.

    Args:
        shards: of `class_dim`.
        logits: any shape, floating.
        target: class indices, int64, the shape of `logits` without `class_dim`.
        weight: of every class (not only this device's), no gradient.
        class_dim: of `logits`.
        ignore_index: positions with this target count nothing.
        label_smoothing: 0 to 1.
        reduction: ``"sum"`` (a scalar, at least float32: thousands of terms don't add up in 16 bits) or ``"none"``
            (per position, in the dtype of `logits`).
    """
    rows = torch.movedim(logits, class_dim, -1)
    losses, _ = sharded_losses(shards, rows, target, weight, ignore_index, label_smoothing)
    return losses.sum() if reduction == "sum" else losses.to(logits.dtype)


def sharded_losses(
    shards: Shards,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """The loss of each position and its ``log Z``, at least float32, of logits ``[..., own classes]``.

    See `vocab_parallel_cross_entropy`.
    """
    num_local = logits.shape[-1]
    num_classes = num_local * shards.count
    if weight is not None and weight.shape != (num_classes,):
        raise ValueError(
            f"class weights must be whole on every device: {num_classes} classes, "
            f"but weights of shape {tuple(weight.shape)}"
        )
    settings = _Settings(shards, num_classes, shards.index * num_local, ignore_index, label_smoothing)
    return call_function(_CrossEntropy, logits, target, weight, settings)


@dataclass(frozen=True)
class _Settings:
    """What is not a tensor.  `first` is the first class of this device."""

    shards: Shards
    num_classes: int
    first: int
    ignore_index: int
    label_smoothing: float

    def locate(self, target: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """The target as an index into the own classes, clamped, and whether it is one of these and counts.

        The index of a target that is no class stays out of range, so that reading there raises as on one device.
        """
        index, is_counted = target - self.first, target != self.ignore_index
        is_own = (index >= 0) & (index < num_local) & is_counted
        is_wrong = ((target < 0) | (target >= self.num_classes)) & is_counted
        return index.clamp_(0, num_local - 1).masked_fill_(is_wrong, num_local).unsqueeze(-1), is_own


class _CrossEntropy(torch.autograd.Function):
    """Per-position losses and ``log Z`` of logits ``[..., own classes]``."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        dtype = logits.dtype if logits.dtype is torch.float64 else torch.float32
        top = settings.shards.all_reduce(logits.amax(-1).to(dtype), "max")
        top = top.masked_fill(top == -torch.inf, 0.0)  # no class is possible: log Z shall be -inf, not nan
        index, is_own = settings.locate(target, logits.shape[-1])
        own_sums = _local_sums(logits, top, index, is_own, weight, settings)
        sums = settings.shards.all_reduce(own_sums)
        log_z = sums[0].log()
        counts, smooth_counts = _counts(target, weight, settings, log_z)
        losses = (1 - settings.label_smoothing) * counts * (log_z - sums[1])
        if settings.label_smoothing:
            losses += smooth_counts * (_total_weight(weight, settings) * log_z - sums[2])
        losses.masked_fill_(target == settings.ignore_index, 0.0)
        log_z.add_(top)
        ctx.save_for_backward(logits, target, log_z, *(() if weight is None else (weight,)))
        ctx.settings = settings
        return losses, log_z

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, target, log_z, *weights = ctx.saved_tensors
        settings: _Settings = ctx.settings
        weight = weights[0] if weights else None
        index, is_own = settings.locate(target, logits.shape[-1])
        counts, smooth_counts = _counts(target, weight, settings, log_z)
        incoming = gradients[0].to(log_z.dtype).masked_fill(target == settings.ignore_index, 0.0)
        hard = (1 - settings.label_smoothing) * counts * incoming
        soft = smooth_counts * incoming
        gradient = torch.sub(logits, log_z.unsqueeze(-1)).exp_()  # the softmax of the own classes
        factor = hard + _total_weight(weight, settings) * soft if settings.label_smoothing else hard
        factor = factor + gradients[1]
        gradient *= factor.unsqueeze(-1)
        gradient.scatter_add_(-1, index, (-hard * is_own).unsqueeze(-1))
        if settings.label_smoothing:
            gradient -= soft.unsqueeze(-1) * _own_weight(weight, settings, logits.shape[-1], log_z)
        return gradient.to(logits.dtype), None, None, None


def _local_sums(
    logits: Tensor, top: Tensor, index: Tensor, is_own: Tensor, weight: Tensor | None, settings: _Settings
) -> Tensor:
    """``[2 or 3, ...]``, relative to `top`: sum of exp, target's logit if here, weighted sum of logits."""
    at_target = logits.gather(-1, index).squeeze(-1).to(top.dtype) - top
    shifted = torch.sub(logits, top.unsqueeze(-1))
    sums = [at_target.masked_fill_(~is_own, 0.0)]
    if settings.label_smoothing:
        sums.append(shifted.sum(-1) if weight is None
                    else shifted @ _own_weight(weight, settings, logits.shape[-1], top))  # fmt: skip
    return torch.stack([shifted.exp_().sum(-1), *sums])


def _counts(target: Tensor, weight: Tensor | None, settings: _Settings, like: Tensor) -> tuple[Tensor | float, float]:
    """How much each position's target counts, and the factor of the smoothed part."""
    smooth = settings.label_smoothing / settings.num_classes
    if weight is None:
        return 1.0, smooth
    return weight.to(like.dtype)[target.clamp(0, settings.num_classes - 1)], smooth


def _own_weight(weight: Tensor | None, settings: _Settings, num_local: int, like: Tensor) -> Tensor:
    if weight is None:
        return like.new_ones(())
    return weight.narrow(0, settings.first, num_local).to(like.dtype)


def _total_weight(weight: Tensor | None, settings: _Settings) -> Tensor | float:
    return float(settings.num_classes) if weight is None else weight.sum()
