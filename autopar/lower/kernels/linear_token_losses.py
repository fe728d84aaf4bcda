"""A product and the cross entropy of each token in pieces of tokens, whole and over a vocabulary cut into slices.

What a caller makes of the losses decides their gradients, so backward makes the logits of each piece again: a fourth
product of that size, for which nothing as large as the logits is ever there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.cross_entropy import cross_entropy, sharded_losses
from autopar.lower.kernels.logit_pieces import Chain, GradientSums, LogitPieces

__all__ = ["linear_token_losses", "vocab_parallel_linear_token_losses"]


def linear_token_losses(*arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`vocab_parallel_linear_token_losses` of all classes, on one device."""
    return vocab_parallel_linear_token_losses(None, *arguments)


def vocab_parallel_linear_token_losses(  # noqa: PLR0913  (its arguments)
    shards: Shards | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    chain: Chain,
    ignore_index: int,
    label_smoothing: float,
    tokens: int,
    has_log_sums: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The cross entropy of ``chain(hidden @ weight.T + bias)`` of each token, in the dtype of the logits.

    On a slice of the classes it is a term of a sum, which the first device has, and the gradient of `hidden` is a term,
    too.  Communicates what ``vocab_parallel_cross_entropy`` does for each piece, forward, and backward again.

    Args:
        shards: of the classes; None: one device has all of them.
        hidden: ``[..., h]``, floating.
        weight: ``[this device's classes, h]``.
        bias: ``[this device's classes]``.
        target: class indices, int64, the shape of `hidden` without its last dim.
        class_weight: of all classes, no gradient.
        chain: what happens to logits, element by element: entries ``(target, args, kwargs, saves)``.
        ignore_index: tokens with this target have no loss.
        label_smoothing: 0 to 1.
        tokens: how many get their logits at a time.
        has_log_sums: also give the logarithm of the sum of exponentials of each token's logits.
    """

    def of(logits: Tensor, own: Tensor) -> tuple[Tensor, ...]:
        if shards is None:
            losses = cross_entropy(logits, own, class_weight, 1, ignore_index, label_smoothing, "none")
            return (losses, logits.logsumexp(-1)) if has_log_sums else (losses,)
        parts = sharded_losses(shards, logits, own, class_weight, ignore_index, label_smoothing)
        return tuple(each.to(logits.dtype) for each in parts[: 1 + has_log_sums])

    pieces = LogitPieces(chain, of, tokens, has_sum=shards is None or shards.index == 0)
    losses = call_function(_LinearTokenLosses, hidden, weight, bias, target, pieces)
    return losses if len(losses) > 1 else losses[0]


class _LinearTokenLosses(torch.autograd.Function):
    """Keeps its operands."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, pieces: LogitPieces
    ) -> tuple[Tensor, ...]:
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        parts = [
            pieces.of(torch.nn.functional.linear(rows[own], weight, bias), targets[own])
            for own in pieces.cut(len(targets))
        ]
        ctx.save_for_backward(hidden, weight, target, *(() if bias is None else (bias,)))
        ctx.pieces = pieces
        joined = tuple(torch.cat(each).view(target.shape) for each in zip(*parts, strict=True))
        return joined if pieces.has_sum else tuple(map(torch.zeros_like, joined))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, target, *rest = ctx.saved_tensors
        bias, pieces = rest[0] if rest else None, ctx.pieces
        sums = GradientSums(hidden, weight, bias, ctx.needs_input_grad[:3])
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        incoming = [each.reshape(-1) for each in gradients]
        for own in pieces.cut(len(targets)):
            logits = torch.nn.functional.linear(rows[own], weight, bias)
            _, gradient = pieces.with_gradient(logits, targets[own], [each[own] for each in incoming])
            del logits  # and its gradient are gone before the next piece's come
            sums.add(own.start, rows[own], weight, gradient)
            del gradient
        kept = iter(sums.kept)
        return (*(next(kept) if takes else None for takes in ctx.needs_input_grad[:3]), None, None)
