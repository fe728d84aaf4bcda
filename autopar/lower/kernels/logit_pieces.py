"""Logits piece by piece: a linear layer's rows, what happens to its result, and gradients as pieces give them.

`linear_cross_entropy` and `linear_token_losses` differ in when a piece's logits are there; this is what they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.linear_cross_entropy import X

__all__ = ["Chain", "GradientSums", "LogitPieces"]

Chain = Sequence[Sequence[Any]]
"""What happens to logits, element by element: entries ``(target, args, kwargs, saves)``."""

Losses = tuple[Tensor, ...]


@dataclass(frozen=True)
class LogitPieces:
    """How losses are computed of the logits of `tokens` tokens at a time.

    Args:
        chain: what happens to logits before.
        losses: of logits and targets.
        tokens: how many get their logits at a time.
        has_sum: whether this device has the sum, of which all have terms; others put out zeros.
    """

    chain: Chain
    losses: Callable[[Tensor, Tensor], Losses]
    tokens: int
    has_sum: bool = True

    def of(self, logits: Tensor, target: Tensor) -> Losses:
        """The losses of a piece."""
        for entry in self.chain:
            logits = _run(logits, *entry[:3])
        return self.losses(logits, target)

    def cut(self, count: int) -> Iterator[slice]:
        """The tokens of each piece of so many."""
        return (slice(start, start + self.tokens) for start in range(0, max(1, count), self.tokens))

    def with_gradient(
        self, logits: Tensor, target: Tensor, incoming: Sequence[Tensor] | None = None
    ) -> tuple[Losses, Tensor]:
        """The losses of a piece, and the gradient of its logits by those of the losses (by default of one loss: 1)."""
        # Around the step, hooks may say what becomes of what autograd saves: that is for what outlives this call.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
            leaf = logits.detach().requires_grad_()
            losses = self.of(leaf, target)
            (gradient,) = torch.autograd.grad(losses, leaf, incoming)
        return tuple(loss.detach() for loss in losses), gradient


def _run(x: Tensor, target: str, args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]) -> Tensor:
    from autopar.lower.kernels import resolve_target  # noqa: PLC0415  (it finds this file)

    named = {key: x.device if key == "device" else value for key, value in kwargs}
    return resolve_target(target)(*(x if isinstance(arg, str) and arg == X else arg for arg in args), **named)


class GradientSums:
    """Those of the operands, as far as they have been added up."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, trains: tuple[bool, bool, bool]) -> None:
        """Nothing has been added."""
        self._hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if trains[0] else None
        self._weight = torch.zeros_like(weight) if trains[1] else None
        self._bias = torch.zeros_like(bias) if bias is not None and trains[2] else None

    @property
    def kept(self) -> list[Tensor]:
        """Those that are needed, in order."""
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
