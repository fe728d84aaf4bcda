"""The callables behind `Op.target` and `Option.kernel`.

`OPS` are whole ops on plain tensors, `KERNELS` the special kernels that run an op on shards of a factor that plain
local computation cannot be split on.  The records of ops (`autopar.ops`) name them; each is a function in a file of
this folder.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopar.errors import PlanMismatchError
from autopar.ops import own_families
from autopar.program import Arg, Op, Ref

__all__ = ["APART", "KERNELS", "OPS", "PARTS", "chooses_device", "resolve_target", "run_ops", "torch_argument"]

_MODULES = {"operator": operator, "_operator": operator, "math": math, "builtins": builtins, "torch": torch}
_FILES = tuple(import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__))
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {name: getattr(file, name) for file in _FILES for name in file.__all__}

OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {target: _FUNCTIONS[each.function] for each in own_families() if each.function for target in each.rules}
)
"""Whole ops, called with the op's arguments: autopar's own, and those of torch that need care."""

KERNELS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: _FUNCTIONS[name] for each in own_families() for name in each.kernels}
)
"""Special kernels, called ``kernel(shards, *local_args, **kwargs)``."""

PARTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: _FUNCTIONS[kernel.parts] for each in own_families() for name, kernel in each.kernels.items() if kernel.parts}
)
"""Special kernels that can run in parts, as generator functions with the same arguments."""

APART: frozenset[Callable[..., Any]] = frozenset(
    _FUNCTIONS[name]
    for each in own_families()
    if each.runs_apart
    for name in filter(None, (each.function, *each.kernels))
)
"""Those of either that a compiler leaves out of what it compiles."""


def resolve_target(target: str) -> Callable[..., Any]:
    """The callable that `Op.target` names.

    ``"autopar.<name>"`` (and little else) is in `OPS`; ``"operator.<name>"``, ``"math.<name>"``,
    ``"builtins.<name>"`` and ``"torch.<name>"`` are Python functions; ``"<namespace>.<op>.<overload>"`` is a torch op.

    Raises:
        PlanMismatchError: nothing has that name here, for instance because a library of ops is not imported.
    """
    if target in OPS:
        return OPS[target]
    head, *path = target.split(".")
    results: Any = _MODULES.get(head) or (getattr(torch.ops, head) if path else getattr(builtins, head, None))
    try:
        for part in path:
            results = getattr(results, part)
    except AttributeError:
        results = None
    if not callable(results):
        raise PlanMismatchError(
            f"no op is called {target!r} in this process: import the library that defines it before calling autopar"
        )
    return results


def torch_argument(arg: Arg, value_of: Callable[[Ref], Any]) -> Any:
    """An argument of an op in torch's form: values of the program by `value_of`, dtypes by their names, lists."""
    if isinstance(arg, Ref):
        return value_of(arg)
    if isinstance(arg, tuple):
        return [torch_argument(part, value_of) for part in arg]
    if isinstance(arg, str) and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    return arg


def chooses_device(op: Op) -> bool:
    """Whether a call says where its result is, having no operand to follow; torch would make it on the CPU."""
    return _takes_device(op.target) and (not op.operands or any(key == "device" for key, _ in op.kwargs))


@cache  # steps of groups ask for every op that counts
def _takes_device(target: str) -> bool:
    schema = getattr(resolve_target(target), "_schema", None)
    return schema is not None and any(argument.name == "device" for argument in schema.arguments)


def run_ops(ops: Sequence[Op], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`values` and what `ops`, which have one result each, make of them, whole tensors by name."""
    known = dict(values)
    device = next((x.device for x in values.values()), torch.device("cpu"))
    for op in ops:
        args = [torch_argument(arg, lambda ref: known[ref.name]) for arg in op.args]
        kwargs = {key: torch_argument(arg, lambda ref: known[ref.name]) for key, arg in op.kwargs}
        if chooses_device(op):
            kwargs["device"] = device
        known[op.results[0]] = resolve_target(op.target)(*args, **kwargs)
    return known
