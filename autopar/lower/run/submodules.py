"""Submodules of a parallel module that are called alone: each call is a program on the whole model's parameters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import SubmoduleError
from autopar.lower.compat import module_tables, not_compiled
from autopar.lower.parameters.other_stages import is_elsewhere
from autopar.lower.parameters.skeleton import named_parts
from autopar.lower.run.generation import generation_methods

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
    """Have ``state_dict()`` of `root` and of its submodules give what this rank's pipeline stages have.

    These are ordinary DTensors of the stage's ranks: torch.distributed.checkpoint saves each from its own ranks.
    """
    for _, part in named_parts(root):
        module: Any = part
        module.register_state_dict_post_hook(_keep_own_parts)


def _keep_own_parts(module: Any, state: dict[str, Any], prefix: str, _: object) -> None:
    root: Any = module.__dict__.get("_parallel_root", lambda: module)()
    for name, parameter in module_tables(module).parameters.items():
        value = state.get(prefix + name)
        if is_elsewhere(value):
            del state[prefix + name]
        elif isinstance(value, DTensor) and value is not parameter and root is not None:
            state[prefix + name] = root._store.on_device_mesh(value)


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
