"""Instance norm as tracing wants it: its kernel updates running statistics unseen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["written_instance_norms"]


def written_instance_norms() -> contextlib.AbstractContextManager[Any]:
    """Inside, instance norm updates its running statistics where tracing sees it: its kernel does so unseen."""
    kernel = torch.instance_norm
    # With the kernel's name, which torch reads of all its functions.
    return patch.object(torch, "instance_norm", update_wrapper(partial(_instance_norm, kernel), kernel))


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
