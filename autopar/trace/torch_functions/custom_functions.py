"""Calls of a custom ``torch.autograd.Function`` as ops: each is one op, with the function's own forward and backward.

An op takes the tensors of its calls; their other arguments belong to the op, so that calls with other ones are other
ops.  Under autograd, an op is the function itself, with a context of its own in every call.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.objects.tensor_versions import version_of
from autopar.ops import LAUNCHING_NAMESPACE
from autopar.trace.compat import torch_internals
from autopar.trace.compat.foreign_kernels import forgetting_values, in_own_memory, launches_left_out

__all__ = ["call_as_op", "decides_on_values", "is_custom_function"]

NAMESPACE = "autopar_function"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")
_LAUNCHING: Any = torch.library.Library(LAUNCHING_NAMESPACE, "FRAGMENT")
_PLAIN = (
    bool, int, float, complex, str, bytes, slice, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(None),
)  # fmt: skip


Results = Tensor | tuple[Tensor, ...]


class _Hole:
    """Where a tensor was."""

    def __repr__(self) -> str:
        return "Tensor"


def is_custom_function(target: str) -> bool:
    """Whether an op is a custom function."""
    return target.startswith((f"{NAMESPACE}.", f"{LAUNCHING_NAMESPACE}."))


def decides_on_values(target: str) -> bool:
    """Whether an op is a custom function whose forward has conditions on values: those of a slice may be others."""
    return is_custom_function(target) and _CALLS[target.split(".")[1]].decides


@dataclass
class _FunctionOp:
    """What the calls of one op have in common.

    Args:
        name: of the op.
        function: the class.
        leaves: the arguments, flat, with holes for tensors.
        structure: of the arguments.
        returned: what the function returns, flat, with holes for tensors.
        returned_structure: of that.
        namespace: of the op.
        library: where it is registered.
        decides: its forward branches on values, which random numbers, and those of a slice, may not show.
    """

    name: str
    function: type
    leaves: tuple[Any, ...]
    structure: Any
    returned: tuple[Any, ...] = ()
    returned_structure: Any = None
    namespace: str = NAMESPACE
    library: Any = _LIBRARY
    decides: bool = False

    def register(self, tensors: Sequence[Tensor]) -> None:
        """Make the op; a run on fake tensors like `tensors` shows what it returns."""
        self._run_fake(*tensors)
        args = ", ".join(f"Tensor x{index}" for index in range(len(tensors)))
        results = ["Tensor"] * self.returned.count(_HOLE)
        self.library.define(f"{self.name}({args}) -> ({', '.join(results)})")
        self.library.impl(self.name, self._run_with_gradient, "Autograd")
        self.library.impl(self.name, self._run_alone, "CompositeExplicitAutograd")
        library: Any = torch.library
        library.register_fake(f"{self.namespace}::{self.name}", self._run_fake, lib=self.library)

    def run(self, tensors: Sequence[Tensor]) -> Results:
        """The op's results."""
        return getattr(getattr(torch.ops, self.namespace), self.name)(*tensors)

    def _run_with_gradient(self, *tensors: Tensor) -> Results:
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self._apply(tensors)
        with torch_internals.below_autograd():
            return self.run(tensors)

    def _run_alone(self, *tensors: Tensor) -> Results:
        with torch.no_grad():
            return self._apply(tensors)

    def _run_fake(self, *tensors: Tensor) -> Results:
        """Results without values, of the shapes that the function gives for tensors like these."""
        with torch_internals.untraced() as mode, launches_left_out() as left_out:
            made = self._run_alone(*(torch_internals.fake_tensor(mode, x) for x in tensors))
        if left_out:
            self.library, self.namespace = _LAUNCHING, LAUNCHING_NAMESPACE
        results = (made,) if isinstance(made, Tensor) else made
        if any(isinstance(size, torch_internals.SYMBOLIC) for x in results for size in x.shape):
            raise TraceError(
                f"{self.function.__qualname__}, a custom torch.autograd.Function, gives a tensor whose shape depends "
                "on values: give it one of a size that is known, such as the largest"
            )
        device = tensors[0].device if tensors else None
        likes = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in results)
        return likes[0] if isinstance(made, Tensor) else likes

    def _apply(self, tensors: Sequence[Tensor]) -> Results:
        versions = list(map(version_of, tensors))
        args = torch_internals.unflatten(_filled(self.leaves, tensors), self.structure)
        with forgetting_values(tensors) as decisions:
            leaves, structure = torch_internals.flatten(torch_internals.apply_itself(self.function, *args))
        self.decides = self.decides or decisions.were_asked
        if versions != list(map(version_of, tensors)):
            raise TraceError(
                f"{self.function.__qualname__}, a custom torch.autograd.Function, writes to its argument in place: "
                "let it return a new tensor (work on x.clone(), without ctx.mark_dirty)"
            )
        self.returned = tuple(_HOLE if isinstance(x, Tensor) else x for x in leaves)
        self.returned_structure = structure
        results = tuple(in_own_memory((x for x in leaves if isinstance(x, Tensor)), tensors))
        return results[0] if len(results) == 1 else results


_HOLE = _Hole()
_CALLS: dict[str, _FunctionOp] = {}  # as torch keeps its ops: for the life of the process


def call_as_op(function: type, args: tuple[Any, ...]) -> Any:
    """What ``function.apply(*args)`` returns, computed by an op that a graph can hold.

    Raises:
        TraceError: an argument is something that an op can't carry, or fake tensors can't pass through the function.
    """
    flat, structure = torch_internals.flatten(args)
    tensors = [x for x in flat if isinstance(x, Tensor)]
    leaves = tuple(_HOLE if isinstance(x, Tensor) else x for x in flat)
    other = next((x for x in leaves if x is not _HOLE and not isinstance(x, _PLAIN)), None)
    if other is not None:
        raise TraceError(
            f"{function.__qualname__}, a custom torch.autograd.Function, gets a {type(other).__name__}: pass tensors, "
            "numbers and text only (the parameters of a module one by one), so that it can be carried as an op"
        )
    try:
        call = _find(function, leaves, structure, tensors)
        results = call.run(tensors)
    except RuntimeError as error:
        if "data pointer" not in str(error):
            raise
        raise TraceError(
            f"{function.__qualname__}, a custom torch.autograd.Function, runs a kernel that needs memory while the "
            "model is traced: make the kernel an op with torch.library.custom_op (or triton_op) and register_fake"
        ) from error
    flat_results = [results] if isinstance(results, Tensor) else results
    return torch_internals.unflatten(_filled(call.returned, flat_results), call.returned_structure)


def _find(function: type, leaves: tuple[Any, ...], structure: Any, tensors: Sequence[Tensor]) -> _FunctionOp:
    text = f"{function.__module__}.{function.__qualname__} {leaves!r} {structure}"
    name = f"{function.__name__}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    while name in _CALLS and _CALLS[name].function is not function:
        name += "_"  # another class of the same name, such as one that was made in a function twice
    if name not in _CALLS:
        call = _FunctionOp(name, function, leaves, structure)
        call.register(tensors)
        _CALLS[name] = call
    return _CALLS[name]


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    rest = iter(tensors)
    return [next(rest) if x is _HOLE else x for x in leaves]
