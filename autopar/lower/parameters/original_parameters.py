"""Finds optimizers that were made before `autopar.parallelize`, of the original's parameters: they train nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.errors import OptimizerError
from autopar.lower.once import once

__all__ = ["watch_optimizers"]

_ORIGINALS: set[int] = set()  # ids of parameters that are alive


def watch_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """From now on a step of an optimizer that has some of these, and no gradient for any of them, is an error.

    Whoever trains the original on purpose has gradients.
    """
    _watch_steps()
    for parameter in parameters:
        _ORIGINALS.add(id(parameter))
        weakref.finalize(parameter, _ORIGINALS.discard, id(parameter))


@once
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_check_step)
    scaler: Any = torch.amp.GradScaler
    step = scaler.step

    @wraps(step)
    def checked_step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():  # it refuses an optimizer without gradients before that steps
            _check_step(optimizer)
        return step(self, optimizer, *args, **kwargs)

    scaler.step = checked_step


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = [parameter for parameter in listed if id(parameter) in _ORIGINALS and parameter.requires_grad]
    if own and all(parameter.grad is None for parameter in own):
        name = type(optimizer).__name__
        raise OptimizerError(
            f"this {name} has {len(own)} parameters of the model that was passed to autopar.parallelize, none of which "
            "has a gradient: what trains is the module that parallelize returned, and it has parameters of its own. "
            f"Make the optimizer after it: model = autopar.parallelize(model, ...); {name}(model.parameters(), ...)"
        )
