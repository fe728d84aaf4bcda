"""Submodules of a parallel module that are called alone: each call is a program on the whole model's parameters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import SubmoduleError
from autopar.lower.compat import give_state, module_tables, not_compiled
from autopar.lower.parameters.other_stages import is_elsewhere
from autopar.lower.parameters.saved_files import StateDict
from autopar.lower.parameters.skeleton import named_parts
from autopar.lower.run.generation import generation_methods
from autopar.lower.run.module_state import is_plain_value

__all__ = ["bind_submodules", "save_own_parts"]


def bind_submodules(root: nn.Module) -> None:
    """Have each submodule of `root` run, when it is called, as ``root._run_part(its name, args, kwargs)``."""
    for name, module in named_parts(root):
        if not name:
            continue
        kind = type(module)
        for method, function in {"forward": _forward(name, kind), **generation_methods(kind)}.items():
            vars(module)[method] = MethodType(function, module)
        vars(module)["_parallel_root"] = weakref.ref(root)


def save_own_parts(root: nn.Module) -> None:
    """Have ``state_dict()`` of `root` and of its submodules give what this rank's pipeline stages have, and submodules
    load that.

    These are ordinary DTensors of the stage's ranks: torch.distributed.checkpoint saves each from its own ranks.
    """
    for name, module in named_parts(root):
        give_state(module, partial(_keep_own_parts, name))
        if name:
            untyped: Any = module
            untyped.register_load_state_dict_pre_hook(_pass_over_stages)


def _keep_own_parts(part: str, module: Any, state: dict[str, Any], prefix: str, _: object) -> dict[str, Any] | None:
    """The state to give; None: `state`, as it is now."""
    root: Any = module.__dict__.get("_parallel_root", lambda: module)()
    for name, parameter in module_tables(module).parameters.items():
        value = state.get(prefix + name)
        if is_elsewhere(value):
            del state[prefix + name]
        elif isinstance(value, DTensor) and value is not parameter and root is not None:
            state[prefix + name] = root._store.on_device_mesh(value)
    is_asked_alone = part and not prefix and not isinstance(state, StateDict)
    return root._state_of_part(part, state) if is_asked_alone and root is not None else None


def _pass_over_stages(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before a submodule alone loads parts: entries of other stages, which are not among them, stay as they are."""
    own = {} if prefix else dict(module.named_parameters(remove_duplicate=False))
    if not any(is_plain_value(state.get(name)) for name in own):
        state.update({name: x for name, x in own.items() if is_elsewhere(x) and name not in state})


def _forward(name: str, kind: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = self.__dict__["_parallel_root"]()
        if root is None or root.get_submodule(name) is not self:
            raise SubmoduleError(
                f"this {kind.__name__} is a copy of {name!r} of a parallelized model, or that model is gone, and it "
                "does not run alone: it may hold slices of its parameters only. Copy the whole model with "
                "copy.deepcopy, or load full_state_dict() into the original model"
            )
        return root._run_part(name, args, kwargs)

    made: Any = not_compiled(forward)
    made.__signature__ = inspect.signature(kind.forward)
    return made
