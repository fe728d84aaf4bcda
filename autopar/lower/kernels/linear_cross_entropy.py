"""A product and the cross entropy of its result in pieces of tokens, whole and over a vocabulary cut into slices.

The gradients of a piece follow its loss at once, and are added up: what is kept until backward are the gradients of
the hidden states and of the weight for a loss with gradient 1, and backward scales them.  Only one piece's logits are
ever there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels import cross_entropy as losses
from autopar.ops.linear_cross_entropy import X

__all__ = ["linear_cross_entropy", "vocab_parallel_linear_cross_entropy"]

Chain = Sequence[Sequence[Any]]


def linear_cross_entropy(  # noqa: PLR0913  (its arguments)
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

    Args:
        hidden: ``[..., h]``, floating.
        weight: ``[classes, h]``.
        bias: ``[classes]``.
        target: class indices, int64, the shape of `hidden` without its last dim.
        class_weight: ``[classes]``, no gradient.
        chain: what happens to logits, element by element: entries ``(target, args, kwargs, saves)``.
        ignore_index: tokens with this target count nothing.
        label_smoothing: 0 to 1.
        tokens: how many get their logits at a time.
    """
    loss = partial(losses.cross_entropy, class_dim=1, ignore_index=ignore_index, label_smoothing=label_smoothing)
    return _sum(hidden, weight, bias, target, class_weight, _Pieces(chain_steps(chain), loss, tokens))


def vocab_parallel_linear_cross_entropy(  # noqa: PLR0913  (its arguments)
    shards: Shards,
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
    """The same on this device's slice of the classes: a term of the sum, which the first device has.

    The gradient of `hidden` is a term, too.  Communicates forward what ``vocab_parallel_cross_entropy`` does, for each
    piece.

    Args:
        shards: of the classes.
        hidden: as in `linear_cross_entropy`.
        weight: of this device's classes.
        bias: of this device's classes.
        target: as in `linear_cross_entropy`.
        class_weight: of every class.
        chain: as in `linear_cross_entropy`.
        ignore_index: as there.
        label_smoothing: as there.
        tokens: as there.
    """
    loss = partial(
        losses.vocab_parallel_cross_entropy, shards, class_dim=1, ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )  # fmt: skip
    pieces = _Pieces(chain_steps(chain), loss, tokens, has_sum=shards.index == 0)
    return _sum(hidden, weight, bias, target, class_weight, pieces)


@dataclass(frozen=True)
class _Pieces:
    """How the loss of a piece is computed of its logits; without `has_sum` another device has the sum."""

    steps: tuple[Callable[[Tensor], Tensor], ...]
    loss: Callable[..., Tensor]
    tokens: int
    has_sum: bool = True

    def of(self, logits: Tensor, target: Tensor, class_weight: Tensor | None) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return self.loss(logits, target, class_weight)


def chain_steps(chain: Chain) -> tuple[Callable[[Tensor], Tensor], ...]:
    """The ops of `chain` as functions of the logits."""
    return tuple(_step(target, args, kwargs) for target, args, kwargs, _ in chain)


def _step(target: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]) -> Callable[[Tensor], Tensor]:
    from autopar.lower.kernels import resolve_target  # noqa: PLC0415  (it finds this file)

    function = resolve_target(target)
    named = dict(kwargs)

    def run(x: Tensor) -> Tensor:
        own = {key: x.device if key == "device" else value for key, value in named.items()}
        return function(*(x if isinstance(arg, str) and arg == X else arg for arg in args), **own)

    return run


def _sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, pieces: _Pieces
) -> Tensor:
    is_recording = torch.is_grad_enabled()
    trains = tuple(is_recording and x is not None and x.requires_grad for x in (hidden, weight, bias))
    return call_function(_LinearCrossEntropy, hidden, weight, bias, target, class_weight, pieces, trains)


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over pieces; what it keeps are gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        pieces: _Pieces,
        trains: tuple[bool, bool, bool],
    ) -> Tensor:
        found = GradientSums(hidden, weight, bias, trains)
        total: Tensor | None = None
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
        for start in range(0, max(1, rows.shape[0]), pieces.tokens):
            part = rows[start : start + pieces.tokens]
            logits = torch.nn.functional.linear(part, weight, bias)
            loss, gradient = _piece(pieces, logits, targets[start : start + pieces.tokens], class_weight, any(trains))
            total = loss if total is None else total + loss
            del logits  # and its gradient are gone before the next piece's come
            if gradient is not None:
                found.add(start, part, weight, gradient)
            del gradient
        assert total is not None
        ctx.save_for_backward(*found.kept)
        ctx.trains = trains
        return total if pieces.has_sum else torch.zeros_like(total)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        kept = iter(ctx.saved_tensors)
        scaled = (next(kept) * gradients[0] if takes else None for takes in ctx.trains)
        return (*scaled, None, None, None, None)


def _piece(
    pieces: _Pieces, logits: Tensor, target: Tensor, class_weight: Tensor | None, trains: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of a piece, and the gradient of its logits."""
    if not trains:
        return pieces.of(logits, target, class_weight), None
    # Around the step, hooks may say what becomes of what autograd saves: that is for what outlives this call.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        leaf = logits.detach().requires_grad_()
        loss = pieces.of(leaf, target, class_weight)
        (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


class GradientSums:
    """Those of the operands, as far as they have been added up."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, trains: tuple[bool, bool, bool]) -> None:
        """Nothing has been added."""
        self._hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if trains[0] else None
        self._weight = torch.zeros_like(weight) if trains[1] else None
        self._bias = torch.zeros_like(bias) if bias is not None and trains[2] else None

    @property
    def kept(self) -> list[Tensor]:
        """Those that are wanted, in order."""
        return [x for x in (self._hidden, self._weight, self._bias) if x is not None]

    def add(self, start: int, part: Tensor, weight: Tensor, gradient: Tensor) -> None:
        """Those of a piece, of the tokens from `start` on, whose logits have this gradient."""
        if self._hidden is not None:
            rows = self._hidden.view(-1, part.shape[-1])[start : start + part.shape[0]]
            torch.mm(gradient, weight, out=rows)
        if self._weight is not None:
            self._weight.addmm_(gradient.t(), part)
        if self._bias is not None:
            self._bias.add_(gradient.sum(0))
