"""A product and the cross entropy of its result in pieces of tokens, whole and over a vocabulary cut into slices.

The gradients of a piece follow its loss at once, and are added up: what is kept until backward are the gradients of
the hidden states and of the weight for a loss with gradient 1, and backward scales them.  Only one piece's logits are
ever there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.cross_entropy import cross_entropy, vocab_parallel_cross_entropy
from autopar.lower.kernels.logit_pieces import Chain, GradientSums, LogitPieces

__all__ = ["linear_cross_entropy", "vocab_parallel_linear_cross_entropy"]


def linear_cross_entropy(*arguments: Any) -> Tensor:
    """`vocab_parallel_linear_cross_entropy` of all classes, on one device."""
    return vocab_parallel_linear_cross_entropy(None, *arguments)


def vocab_parallel_linear_cross_entropy(  # noqa: PLR0913  (its arguments)
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
) -> Tensor:
    """The sum of the cross entropy of ``chain(hidden @ weight.T + bias)`` over all tokens; at least float32.

    On a slice of the classes it is a term of the sum, which the first device has, and the gradient of `hidden` is a
    term, too.  Communicates forward what ``vocab_parallel_cross_entropy`` does, for each piece.

    Args:
        shards: of the classes; None: one device has all of them.
        hidden: ``[..., h]``, floating.
        weight: ``[this device's classes, h]``.
        bias: ``[this device's classes]``.
        target: class indices, int64, the shape of `hidden` without its last dim.
        class_weight: of all classes, no gradient.
        chain: what happens to logits, element by element: entries ``(target, args, kwargs, saves)``.
        ignore_index: tokens with this target count nothing.
        label_smoothing: 0 to 1.
        tokens: how many get their logits at a time.
    """

    def of(logits: Tensor, own: Tensor) -> tuple[Tensor, ...]:
        settings = class_weight, 1, ignore_index, label_smoothing
        if shards is None:
            return (cross_entropy(logits, own, *settings),)
        return (vocab_parallel_cross_entropy(shards, logits, own, *settings),)

    pieces = LogitPieces(chain, of, tokens, has_sum=shards is None or shards.index == 0)
    is_recording = torch.is_grad_enabled()
    trains = tuple(is_recording and x is not None and x.requires_grad for x in (hidden, weight, bias))
    return call_function(_LinearCrossEntropy, hidden, weight, bias, target, pieces, trains)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over pieces; what it keeps are gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        pieces: LogitPieces,
        trains: tuple[bool, bool, bool],
    ) -> Tensor:
        sums = GradientSums(hidden, weight, bias, trains)
        total: Tensor | None = None
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        for own in pieces.cut(len(targets)):
            logits = torch.nn.functional.linear(rows[own], weight, bias)
            gradient = None
            if any(trains):
                (loss,), gradient = pieces.with_gradient(logits, targets[own])
            else:
                (loss,) = pieces.of(logits, targets[own])
            total = loss if total is None else total + loss
            del logits  # and its gradient are gone before the next piece's come
            if gradient is not None:
                sums.add(own.start, rows[own], weight, gradient)
            del gradient
        assert total is not None
        ctx.save_for_backward(*sums.kept)
        ctx.trains = trains
        return total if pieces.has_sum else torch.zeros_like(total)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)
        scaled = (next(kept) * gradients[0] if takes else None for takes in ctx.trains)
        return (*scaled, None, None, None)
