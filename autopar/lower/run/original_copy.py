"""A parallel module as an ordinary module of the original's class, for files of whole modules."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.lower.compat import ModuleTables, module_tables
from autopar.lower.parameters.saved_device import saved_on
from autopar.lower.parameters.skeleton import named_parts
from autopar.lower.run.generation import generation_methods
from autopar.objects.compiled_modules import is_compiled
from autopar.objects.references import redirect

__all__ = ["changed_part", "copy_original"]

_OWN_OF_PARTS = ("_apply", "_distribute_module_applied", "_parallel_root", "forward")


def changed_part(original: nn.Module) -> str:
    """The name of a module of `original` that its class and attributes don't make up: it was compiled, or got a
    forward of its own; ``""``: there is none.
    """
    for name, part in named_parts(original):
        if is_compiled(part) or "forward" in vars(part):
            return name or type(original).__name__
    return ""


def copy_original(
    module: nn.Module, kind: type[nn.Module], values: Mapping[str, Tensor], own: Container[str]
) -> nn.Module:
    """A module that is what `module` was made of, with values that were trained since.

    Args:
        module: a parallel one.
        kind: the class of the original.
        values: the whole tensor of each parameter, by name.
        own: the attributes that `module` has for itself.
    """
    ids: dict[int, Any] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []

    def copied(old: nn.Module, prefix: str) -> nn.Module:
        if id(old) in ids:
            return ids[id(old)]
        new: Any = object.__new__(type(old) if prefix else kind)
        nn.Module.__init__(new)
        ids[id(old)] = new
        pairs.append((old, new))
        new.training = old.training
        source, target = module_tables(old), module_tables(new)
        _copy_tensors(source, target, lambda name: values[prefix + name], ids)
        for name, child in source.children.items():
            target.children[name] = None if child is None else copied(child, f"{prefix}{name}.")
        return new

    made = copied(module, "")
    for old, new in pairs:
        left_out = own if old is module else (*_OWN_OF_PARTS, *generation_methods(type(old)))
        for name, value in vars(old).items():
            if name not in vars(new) and name not in left_out:
                vars(new)[name] = redirect(value, ids)
    return made


def _copy_tensors(
    source: ModuleTables, target: ModuleTables, value: Callable[[str], Tensor], ids: dict[int, Any]
) -> None:
    for name, parameter in source.parameters.items():
        if parameter is not None and id(parameter) not in ids:
            ids[id(parameter)] = nn.Parameter(
                saved_on(value(name), parameter.device.type), requires_grad=parameter.requires_grad
            )
        target.parameters[name] = None if parameter is None else ids[id(parameter)]
    for name, buffer in source.buffers.items():
        if buffer is not None and id(buffer) not in ids:
            ids[id(buffer)] = saved_on(buffer.detach().cpu(), buffer.device.type)
        target.buffers[name] = None if buffer is None else ids[id(buffer)]
    target.not_saved.update(source.not_saved)
