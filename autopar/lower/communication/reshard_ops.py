"""Run the steps of `autopar.placement.reshard` on local tensors, forward, and backward on gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.lower.autograd import call_function
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.moves import Move, backward_moves, forward_moves, run_moves
from autopar.lower.communication.sharded_rows import ShardedRows
from autopar.placement import REPLICATE, Layout, Step, reshard

__all__ = ["apply_backward", "apply_forward", "reshard_tensor", "time_slice", "whole_copy"]


def reshard_tensor(
    x: Tensor, steps: Sequence[Step], communicator: Communicator, *, differentiable: bool = True
) -> Tensor:
    """The local part of the tensor after `steps`, differentiable by the steps' `backward` in reverse.

    Args:
        x: the local part before; any dtype (integers and bools move without gradient).
        steps: from `autopar.placement.reshard`; empty means `x` itself.
        communicator: of this rank.
        differentiable: False leaves autograd out of it.
    """
    if not steps:
        return x
    if differentiable and x.requires_grad and torch.is_grad_enabled():
        return call_function(_ReshardFunction, x, tuple(steps), communicator)
    return apply_forward(x, steps, communicator)


def apply_forward(x: Tensor, steps: Sequence[Step], communicator: Communicator) -> Tensor:
    """Run the `forward` of `steps` in order, outside autograd."""
    moves: Sequence[Move] = forward_moves(steps)
    if isinstance(x, ShardedRows):
        x, moves = x.part(moves, communicator.rank)
    return run_moves(x.detach(), moves, communicator)


def apply_backward(gradient: Tensor, steps: Sequence[Step], communicator: Communicator) -> Tensor:
    """Run the `backward` of `steps` in reverse order on a gradient, outside autograd."""
    return run_moves(gradient.detach(), backward_moves(steps), communicator)


def whole_copy(part: Tensor, layout: Layout, mesh: tuple[int, ...], communicator: Communicator) -> Tensor:
    """A fresh whole tensor on each rank's device, of which the ranks of `mesh` have parts; outside autograd."""
    steps = reshard(layout, (REPLICATE,) * len(mesh), mesh)
    whole = apply_forward(part.to(communicator.device), steps, communicator)
    return whole.contiguous() if steps else whole.clone(memory_format=torch.contiguous_format)


def time_slice(x: Tensor, dim: int, index: int, count: int) -> Tensor:
    """Slice `index` of `count` equal ones along `dim`: a view, differentiable.

    Raises:
        ValueError: `dim` does not divide by `count`.
    """
    if x.shape[dim] % count:
        raise ValueError(f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by {count} microbatches")
    length = x.shape[dim] // count
    return x.narrow(dim, index * length, length)


class _ReshardFunction(torch.autograd.Function):
    """All steps of a change of layout as one node; it keeps the steps and no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: tuple[Step, ...], communicator: Communicator) -> Tensor:
        ctx.steps = steps
        ctx.communicator = communicator
        ctx.set_materialize_grads(False)
        y = apply_forward(x, steps, communicator)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        if gradients[0] is None:
            return None, None, None
        return apply_backward(gradients[0], ctx.steps, ctx.communicator), None, None
