"""Copies of models whose attributes refer to the copy: lists, closures and hooks, too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from autopar.objects.references import redirect, refers
from autopar.trace.compat.module_trees import MODULE_TABLES, clone_tree, redirect_hooks

__all__ = ["copy_with", "own_copy"]


def own_copy(model: nn.Module) -> nn.Module:
    """A copy that shares no parameter or buffer with `model`; ``copy.deepcopy`` alone shares those of closures."""
    return copy_with(model, [*model.parameters(), *model.buffers()], copy.deepcopy)


def copy_with(model: nn.Module, members: Sequence[Tensor], swap: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of `model` in which every t of `members`, its parameters and buffers, is ``swap(t)``."""
    memo: dict[int, Any] = {id(tensor): swap(tensor) for tensor in members}
    try:
        made = copy.deepcopy(model, memo)
        for module in made.modules():  # deepcopy leaves functions as they are
            referring = {name: x for name, x in vars(module).items() if name not in MODULE_TABLES and refers(x, memo)}
            vars(module).update(redirect(referring, memo))
            redirect_hooks(module, memo)
        return made
    except Exception:  # noqa: BLE001  (modules hold anything: locks, process groups, generators ...)
        return clone_tree(model, swap)
