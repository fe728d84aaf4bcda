"""A module's tree without its code: names, parameters and buffers, for a module that runs something else."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Self

import torch
from torch import Tensor, nn

from autopar.errors import PlanMismatchError
from autopar.lower.compat import module_tables

__all__ = ["Skeleton", "canonical_names", "copy_skeleton", "state_names"]


class Skeleton(nn.Module):
    """A module without code, whose tensors keep the dtype and device that a plan was made for."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``half()``, ``to()`` and their like come down to.

        Raises:
            PlanMismatchError: it would give a tensor another dtype or device.
        """
        for dtype, device in dict.fromkeys((x.dtype, x.device) for x in (*self.parameters(), *self.buffers())):
            made = fn(torch.zeros(1, dtype=dtype, device=device))
            if (made.dtype, made.device) != (dtype, device):
                raise PlanMismatchError(
                    f"the plan was made for {dtype} on {device}: to convert parameters or buffers to {made.dtype} on "
                    f"{made.device} would not change the program that runs. Convert the model before "
                    "autopar.parallelize; to compute in another dtype than parameters have, pass it precision='bf16'"
                )
        untyped: Any = super()
        return untyped._apply(fn, recurse)


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same parameter, as torch orders them."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(parameter), name)
    return found


def copy_skeleton(
    source: nn.Module,
    target: nn.Module,
    make_parameter: Callable[[str, nn.Parameter], nn.Parameter | None],
    make_buffer: Callable[[Tensor], Tensor],
) -> None:
    """Give `target` the submodules, parameters and buffers of `source` in the same order, without
    code.

    Shared modules, parameters and buffers stay shared.  `make_parameter` gets a parameter's full name; where it
    returns None, the name stays without a parameter.
    """
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter | None] = {}
    buffers: dict[int, Tensor] = {}

    def fill(old: nn.Module, new: nn.Module, prefix: str) -> None:
        modules[id(old)] = new
        new.training = old.training
        source, target = module_tables(old), module_tables(new)
        for name, parameter in source.parameters.items():
            if parameter is not None and id(parameter) not in parameters:
                parameters[id(parameter)] = make_parameter(prefix + name, parameter)
            target.parameters[name] = None if parameter is None else parameters[id(parameter)]
        for name, buffer in source.buffers.items():
            if buffer is not None and id(buffer) not in buffers:
                buffers[id(buffer)] = make_buffer(buffer)
            target.buffers[name] = None if buffer is None else buffers[id(buffer)]
        target.not_saved.update(source.not_saved)
        for name, child in source.children.items():
            if child is not None and id(child) not in modules:
                modules[id(child)] = Skeleton()
                fill(child, modules[id(child)], f"{prefix}{name}.")
            target.children[name] = None if child is None else modules[id(child)]

    fill(source, target, "")


def state_names(module: nn.Module, parameters: Container[str]) -> list[str]:
    """The names of ``state_dict`` in its order; `parameters` are those that this or another device group holds."""
    found: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        tables = module_tables(module)
        saved = [name for name, buffer in tables.buffers.items() if buffer is not None and name not in tables.not_saved]
        found.extend(prefix + name for name in tables.parameters if prefix + name in parameters)
        found.extend(prefix + name for name in saved)
        for name, child in tables.children.items():
            if child is not None:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return found
