"""A module's tree for a module that runs something else: submodules of the same types, which have no code to run."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import ModelError, PlanMismatchError, SubmoduleError
from autopar.lower.compat import accumulation_hooks_on, hooks_on, module_tables
from autopar.objects.compiled_modules import CompiledPart, is_compiled
from autopar.objects.module_conversions import first_conversion
from autopar.objects.references import redirect, refers

__all__ = [
    "canonical_names", "carry_attributes", "carry_gradient_hooks", "check_conversion", "copy_skeleton", "named_parts",
    "state_names",
]  # fmt: skip

# What would run the original's code, and what each module makes for itself.
_NOT_CARRIED = frozenset({"forward", "own_forward", "_compiled_call_impl"})


def check_conversion(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise PlanMismatchError if ``half()``, ``to()`` or the like, which call `fn`, would give a tensor of `module`
    another dtype or device than the plan was made for.
    """
    conversion = first_conversion(module, fn)
    if conversion is not None:
        before, after = conversion
        raise PlanMismatchError(
            f"the plan was made for {before}: converting parameters or buffers to {after} would not change the program "
            "that runs. Convert the model before autopar.parallelize; to compute in another dtype than parameters "
            "have, pass it precision='bf16'"
        )


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of every parameter -> the first name of the same parameter, as torch orders them."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        canonical[name] = first.setdefault(id(parameter), name)
    return canonical


def copy_skeleton(
    source: nn.Module,
    target: nn.Module,
    make_parameter: Callable[[str, nn.Parameter], nn.Parameter],
    make_buffer: Callable[[Tensor], Tensor],
) -> None:
    """Give `target` the parameters and buffers of `source` in the same order, and submodules of the same types.

    Shared modules, parameters and buffers stay shared.  `make_parameter` gets a parameter's full name.
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
                modules[id(child)] = _submodule(child)
                fill(child, modules[id(child)], f"{prefix}{name}.")
            target.children[name] = None if child is None else modules[id(child)]
        new.__dict__["_modules"] = _FixedModules(target.children)
        new.__dict__["_parameters"] = _FixedParameters(target.parameters)

    fill(source, target, "")


def carry_attributes(source: nn.Module, target: nn.Module, memo: dict[int, Any] | None = None) -> None:
    """Give the modules and parameters of `target`, a skeleton of `source`, the attributes that those of `source` have.

    Args:
        source: left as it was.
        target: what it has already stays.
        memo: of a deep copy that this is part of, and which has the hooks as well.  Without one attributes are shared;
            modules and tensors of `source` become those of `target`, in lists, dicts and bound methods, too.
    """
    ids: dict[int, Any] = {} if memo is None else memo
    pairs, parameters = _counterparts(source, target, ids)
    for old, new in (*pairs, *parameters):
        for name, value in vars(old).items() if new is not None else ():
            is_hooks = memo is not None and "_hooks" in name
            if (name not in vars(new) or is_hooks) and name not in _NOT_CARRIED:
                made = value if memo is None else copy.deepcopy(value, memo)
                vars(new)[name] = redirect(made, ids) if memo is None or refers(made, ids) else made


def carry_gradient_hooks(source: nn.Module, target: nn.Module) -> None:
    """Have the parameters of `target`, a skeleton of `source`, call the hooks on gradients that those of `source` have,
    with modules and tensors of `target` in their closures.
    """
    ids: dict[int, Any] = {}
    counterparts: list[tuple[Any, Any]] = [*_counterparts(source, target, ids)[1]]
    for old, new in counterparts:
        if new is None:
            continue
        hooks, last = hooks_on(old), accumulation_hooks_on(old)
        if not (hooks or last):
            continue
        is_trained = new.requires_grad
        new.requires_grad_(True)  # a hook needs it, and may have been registered before the parameter was frozen
        for hook in hooks:
            new.register_hook(redirect(hook, ids))
        for hook in last:
            new.register_post_accumulate_grad_hook(redirect(hook, ids))
        new.requires_grad_(is_trained)


def _counterparts(
    source: nn.Module, target: nn.Module, ids: dict[int, Any]
) -> tuple[list[tuple[nn.Module, nn.Module]], list[tuple[nn.Parameter, nn.Parameter | None]]]:
    """The modules and parameters of `source`, each with that of `target`, a skeleton of it; `ids` gets what modules,
    parameters and buffers become, by the id of each.
    """
    pairs = [(old, new) for (_, old), (_, new) in zip(named_parts(source), named_parts(target), strict=True)]
    parameters: dict[int, tuple[Any, Any]] = {}
    for old, new in pairs:
        ids[id(old)] = new
        before, after = module_tables(old), module_tables(new)
        parameters |= {id(p): (p, after.parameters.get(name)) for name, p in before.parameters.items()}
        ids.update((id(buffer), after.buffers[name]) for name, buffer in before.buffers.items())
    ids.update((key, new) for key, (_, new) in parameters.items())
    return pairs, [*parameters.values()]


def named_parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``named_modules()``, without their hashes: that of a metric of torchmetrics reads attributes, which a module
    that is being made does not have yet.
    """
    seen: set[int] = set()

    def walk(part: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(part) in seen:
            return
        seen.add(id(part))
        yield name, part
        for own, child in module_tables(part).children.items():
            if child is not None:
                yield from walk(child, f"{name}.{own}" if name else own)

    return walk(module, "")


def _submodule(original: nn.Module) -> nn.Module:
    """A module of the same type that has nothing yet, and takes no hooks."""
    made: Any = object.__new__(CompiledPart if is_compiled(original) else type(original))
    nn.Module.__init__(made)
    made.__dict__["_apply"] = MethodType(_apply_checked, made)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        made.__dict__[hooks] = _NoHooks(is_reparametrized=_has_removable(vars(original)[hooks]))
    made.__dict__["_distribute_module_applied"] = _NeverDistributed()
    return made


def _has_removable(hooks: Mapping[int, Any]) -> bool:
    """Whether among them is what computes a parameter of others, and can be removed, as weight norm and pruning."""
    if isinstance(hooks, _NoHooks):
        return hooks.is_reparametrized
    return any(callable(getattr(hook, "remove", None)) for hook in hooks.values())


def _apply_checked(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """What ``half()``, ``to()`` and their like of a submodule come down to."""
    check_conversion(module, fn)
    untyped: Any = type(module)
    return untyped._apply(module, fn, recurse)


class _NoHooks(OrderedDict[int, Any]):
    """The hooks of a submodule: none, and none can be added.

    Attributes:
        is_reparametrized: the original has some that compute a parameter of others, which a program does itself.
    """

    def __init__(self, *, is_reparametrized: bool) -> None:
        super().__init__()
        self.is_reparametrized = is_reparametrized

    def items(self) -> Any:
        """What ``remove_weight_norm`` and the like look through; pickle and copies don't come here."""
        if self.is_reparametrized:
            raise ModelError(
                "weight_norm, spectral_norm and torch.nn.utils.prune can't be removed from a parallelized model: the "
                "program that runs computes the weight of what they were given. Remove them from the original model, "
                "which load_state_dict() of full_state_dict() gives the values that were trained"
            )
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), is_reparametrized=self.is_reparametrized), ()

    def __setitem__(self, key: int, hook: Any) -> NoReturn:
        raise SubmoduleError(
            f"the hook {getattr(hook, '__name__', hook)!r} would never run: a parallelized model runs as one program, "
            "whose values this submodule does not see. Register hooks on the whole model, or let its forward return "
            "the value, or register them before autopar.parallelize, which traces what they compute"
        )


class _NeverDistributed:
    """What ``distribute_module`` and ``parallelize_module`` ask of a submodule before they change it."""

    def __bool__(self) -> bool:
        raise ModelError(
            "a part of a parallelized model can't be changed by parallelize_module or distribute_module of "
            "torch.distributed: its parameters lie as the plan says. Leave the call out, or pass what it asks for to "
            "autopar.parallelize, as constraints='tensor=2'"
        )


class _FixedModules(dict[str, nn.Module | None]):
    """The submodules of a module, which stay as they are."""

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        if module is not self.get(name):
            self._refuse(name)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    @staticmethod
    def _refuse(name: str) -> NoReturn:
        raise ModelError(
            f"submodule {name!r} of a parallelized model can't be added, replaced or removed: the program that runs "
            "was made of the model as it was. Change the original model, and call autopar.parallelize after it"
        )


class _FixedParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, which keep their names; a script may add others, and remove these again."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self._names = frozenset(name for name, parameter in parameters.items() if parameter is not None)

    def __setitem__(self, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None and name in self._names:
            self._refuse(name)
        for own in self._names if parameter is not None and name not in self else ():
            if self.get(own) is parameter:
                self._refuse(own)
        super().__setitem__(name, parameter)

    def __delitem__(self, name: str) -> None:
        if name in self._names:
            self._refuse(name)
        super().__delitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    @staticmethod
    def _refuse(name: str) -> NoReturn:
        raise ModelError(
            f"parameter {name!r} of a parallelized model can't be removed or get another name, as "
            "torch.nn.utils.prune, weight_norm and spectral_norm ask for: the program that runs reads it as it was. "
            "Change the original model, and call autopar.parallelize after it"
        )


def state_names(module: nn.Module, parameters: Container[str]) -> list[str]:
    """The names of ``state_dict`` in its order; `parameters` are those that this or another device group holds."""
    names: list[str] = []

    def visit(module: nn.Module, prefix: str) -> None:
        tables = module_tables(module)
        saved = [name for name, buffer in tables.buffers.items() if buffer is not None and name not in tables.not_saved]
        own = [name for name, p in tables.parameters.items() if p is not None or prefix + name in parameters]
        names.extend(prefix + name for name in own)
        names.extend(prefix + name for name in saved)
        for name, child in tables.children.items():
            if child is not None:
                visit(child, f"{prefix}{name}.")

    visit(module, "")
    return names
