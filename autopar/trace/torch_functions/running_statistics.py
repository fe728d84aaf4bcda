"""Norms with running statistics as tracing wants them: kernels update these unseen, or by a number that is data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial, update_wrapper
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autopar.trace.compat.torch_internals import intercept_batch_norms

__all__ = ["written_statistics"]


@contextlib.contextmanager
def written_statistics() -> Generator[None]:
    """Inside, norms update their running statistics where tracing sees it."""
    kernel = torch.instance_norm
    with (
        # With the kernel's name, which torch reads of all its functions.
        patch.object(torch, "instance_norm", update_wrapper(partial(_instance_norm, kernel), kernel)),
        intercept_batch_norms(_cumulative_batch_norm),
    ):
        yield


class _InstanceNorm(NamedTuple):
    """The arguments of torch.instance_norm."""

    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    use_input_stats: bool
    momentum: float
    eps: float
    cudnn_enabled: bool


def _instance_norm(kernel: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    call = _InstanceNorm(*args, **kwargs)
    if not call.use_input_stats:
        return torch.batch_norm(*call[:5], False, *call[6:])
    if call.running_mean is not None and call.running_var is not None:
        with torch.no_grad():
            var, mean = torch.var_mean(call.input, tuple(range(2, call.input.ndim)))
            for running, statistic in ((call.running_mean, mean), (call.running_var, var)):
                running.mul_(1 - call.momentum).add_(statistic.mean(0).to(running.dtype), alpha=call.momentum)
    return kernel(*call._replace(running_mean=None, running_var=None))


def _cumulative_batch_norm(norm: nn.BatchNorm1d, x: Tensor) -> Tensor | None:
    """The result of a batch norm with ``momentum=None``, which averages over all batches: each counts as one of as many
    as there were, a number that torch reads from a buffer.  None for others.
    """
    mean, var, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if norm.momentum is not None or not norm.training or mean is None or var is None or batches is None:
        return None
    with torch.no_grad():
        batches.add_(1)
        fresh = mean.clone(), var.clone()
    y = torch.nn.functional.batch_norm(x, *fresh, norm.weight, norm.bias, True, 1.0, norm.eps)
    with torch.no_grad():
        for running, statistic in zip((mean, var), fresh, strict=True):
            share = 1 / batches.to(running.dtype)
            running.copy_(running * (1 - share) + statistic * share)
    return y
