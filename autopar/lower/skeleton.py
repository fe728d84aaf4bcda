"""A module's tree without its code: names, parameters and buffers, for a module that runs something else."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

__all__ = ["canonical_names", "copy_skeleton"]


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
    make_parameter: Callable[[str, nn.Parameter], nn.Parameter],
    make_buffer: Callable[[Tensor], Tensor],
) -> None:
    """Give `target` the submodules, parameters and buffers of `source` in the same order, as plain ``nn.Module`` s.

    Shared modules, parameters and buffers stay shared.  `make_parameter` gets a parameter's full name.
    """
    modules: dict[int, nn.Module] = {}
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}

    def fill(old: nn.Module, new: nn.Module, prefix: str) -> None:
        modules[id(old)] = new
        new.training = old.training
        for name, parameter in old._parameters.items():
            if parameter is not None and id(parameter) not in parameters:
                parameters[id(parameter)] = make_parameter(prefix + name, parameter)
            new._parameters[name] = None if parameter is None else parameters[id(parameter)]
        for name, buffer in old._buffers.items():
            if buffer is not None and id(buffer) not in buffers:
                buffers[id(buffer)] = make_buffer(buffer)
            new._buffers[name] = None if buffer is None else buffers[id(buffer)]
        new._non_persistent_buffers_set |= old._non_persistent_buffers_set
        for name, child in old._modules.items():
            if child is None:
                new._modules[name] = None
            elif id(child) in modules:
                new._modules[name] = modules[id(child)]
            else:
                made = new._modules[name] = nn.Module()
                fill(child, made, f"{prefix}{name}.")

    fill(source, target, "")
