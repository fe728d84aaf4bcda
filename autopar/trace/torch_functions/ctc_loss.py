"""``F.ctc_loss`` whose lengths are tensors, as tracing wants it: an op that gives the loss of each row of the batch.

Torch reads lengths that are tensors while it computes, so that no graph has them.  The op computes what torch's
kernels do, forward and backward; its backward runs the forward again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from autopar.trace.torch_functions.selections import Selected

__all__ = ["traced_ctc_losses"]

_library: Any = torch.library
_aten: Any = torch.ops.aten


def traced_ctc_losses() -> contextlib.AbstractContextManager[Any]:
    """Inside, ``F.ctc_loss`` with tensors as lengths is an op, and its targets may be ``labels[mask]``."""
    kernel: Any = functional.ctc_loss

    def ctc_loss(
        log_probs: Tensor,
        targets: Any,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> Tensor:
        lengths = (input_lengths, target_lengths)
        if isinstance(targets, Selected) and targets.mask.copy.dim() == targets.values.dim() == 2:
            targets = _pushed_left(targets.values, targets.mask.copy)
        if not all(isinstance(x, Tensor) for x in (targets, *lengths)) or log_probs.dim() != 3:
            return kernel(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        rows: Tensor = torch.ops.autopar_traced.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
        if reduction == "mean":
            return (rows / target_lengths.clamp_min(1).to(rows.dtype)).mean()
        return rows.sum() if reduction == "sum" else rows

    return patch.object(functional, "ctc_loss", ctc_loss)


def _pushed_left(values: Tensor, mask: Tensor) -> Tensor:
    """[rows, columns]: what is selected of each row comes first, in its order."""
    order = torch.argsort(mask.logical_not().to(torch.int64), dim=1, stable=True)
    return values.gather(1, order)


def _run(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    rows = _aten._ctc_loss(log_probs, targets.to(log_probs.device), input_lengths, target_lengths, blank, False)[0]
    return torch.where(rows == torch.inf, 0, rows) if zero_infinity else rows


def _run_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    call = (log_probs, targets.to(log_probs.device), input_lengths, target_lengths)
    kept = _aten._ctc_loss(*call, blank, zero_infinity)
    return _aten._ctc_loss_backward(gradient, *call, *kept, blank, zero_infinity)


def _define(name: str, run: Callable[..., Tensor], like: Callable[..., Tensor]) -> Any:
    made = _library.custom_op(f"autopar_traced::{name}", run, mutates_args=())
    made.register_fake(like)
    return made


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.autopar_traced.ctc_loss_backward(gradient.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return gradients, None, None, None, None, None


def _like_rows(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _like_log_probs(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


_define("ctc_loss", _run, _like_rows).register_autograd(_backward, setup_context=_keep)
_define("ctc_loss_backward", _run_backward, _like_log_probs)
