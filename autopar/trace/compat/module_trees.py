"""Copies of a module and of those inside of it, with what a module keeps of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.objects.references import redirect

__all__ = ["MODULE_TABLES", "clone_tree", "redirect_hooks"]

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module has its parameters, buffers and submodules."""


def clone_tree(model: nn.Module, swap: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of the module tree in which every parameter and buffer t is ``swap(t)``; the rest is shared.

    The way out for modules that can't be deep-copied.
    """
    copies: dict[int, nn.Module] = {}

    def copy(module: nn.Module) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        made: Any = module.__new__(type(module))
        copies[id(module)] = made
        made.__dict__ = dict(module.__dict__)
        for table, change in zip(MODULE_TABLES, (swap, swap, copy), strict=True):
            own: Any = vars(module)[table]
            made.__dict__[table] = {name: None if x is None else change(x) for name, x in own.items()}
        return made

    made = copy(model)
    ids: dict[int, Any] = {**copies, **{id(t): swap(t) for t in (*model.parameters(), *model.buffers())}}
    for module in copies.values():
        own = {name: x for name, x in vars(module).items() if name not in MODULE_TABLES}
        vars(module).update(redirect(own, ids))
        redirect_hooks(module, ids)
    return made


def redirect_hooks(module: nn.Module, ids: Mapping[int, Any]) -> None:
    """Give a copied module forward hooks of its own, which may keep values for a forward, that refer to copies."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks: Any = vars(module)[name]
        vars(module)[name] = type(hooks)((key, redirect(hook, ids)) for key, hook in hooks.items())
