"""The callables behind `Op.target` and `Option.kernel`.

`OPS` are the whole ``autopar.*`` ops on plain tensors, `KERNELS` the special kernels that run an op on shards
of a factor that plain local computation cannot be split on.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.errors import PlanMismatchError
from autopar.lower.compat import call_function
from autopar.lower.kernels.batch_norm import batch_norm, sync_batch_norm
from autopar.lower.kernels.cross_entropy import vocab_parallel_cross_entropy
from autopar.lower.kernels.embedding import vocab_parallel_embedding

__all__ = ["KERNELS", "OPS", "cross_entropy", "cross_entropy_denominator", "dropout", "resolve_target"]

_MODULES = {"operator": operator, "_operator": operator, "math": math, "builtins": builtins, "torch": torch}


def dropout(x: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Zero each element with probability `p` and scale the others by ``1 / (1 - p)``.

    Keeps one byte per element for backward.  `generator` is what the draws come from, by default torch's own.
    """
    if p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    return call_function(_Dropout, x, p, generator)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, generator: torch.Generator | None) -> Tensor:
        keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - p)
        return _scale_kept(x, keep, ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _scale_kept(gradients[0], keep, ctx.scale), None, None


def _scale_kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """``x * keep * scale``, which dropout is forward and backward."""
    if x.device.type == "cpu":  # torch's own op multiplies mixed dtypes there, which took three times as long
        return keep.to(x.dtype).mul_(scale).mul_(x)
    return torch.ops.aten.native_dropout_backward(x, keep, scale)


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


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """``aten.scaled_dot_product_attention`` with a mask in the dtype of `query`.

    torch takes float32 masks whatever the others' dtype, but on the CPU (seen on 2.13) it reads them as float64 where
    the others are: a wrong result without an error.
    """
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(query.dtype)
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, attn_mask, *args, **kwargs)


OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten.scaled_dot_product_attention.default": attention,
        "autopar.dropout": dropout,
        "autopar.cross_entropy": cross_entropy,
        "autopar.cross_entropy_denominator": cross_entropy_denominator,
        "autopar.batch_norm": batch_norm,
    }
)
"""Whole ops, called with the op's arguments: autopar's own, and those of torch that need care."""

KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "vocab_parallel_embedding": vocab_parallel_embedding,
        "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy,
        "sync_batch_norm": sync_batch_norm,
    }
)
"""Special kernels, called ``kernel(communicator, axes, *local_args, **kwargs)``."""


def resolve_target(target: str) -> Callable[..., Any]:
    """The callable that `Op.target` names.

    ``"autopar.<name>"`` (and little else) is in `OPS`; ``"operator.<name>"``, ``"math.<name>"``,
    ``"builtins.<name>"`` and ``"torch.<name>"`` are Python functions; ``"<namespace>.<op>.<overload>"`` is a torch op.

    Raises:
        PlanMismatchError: nothing has that name here, for instance because a library of ops is not imported.
    """
    if target in OPS:
        return OPS[target]
    head, *path = target.split(".")
    found: Any = _MODULES.get(head) or (getattr(torch.ops, head) if path else getattr(builtins, head, None))
    try:
        for part in path:
            found = getattr(found, part)
    except AttributeError:
        found = None
    if not callable(found):
        raise PlanMismatchError(
            f"no op is called {target!r} in this process: import the library that defines it before calling autopar"
        )
    return found
