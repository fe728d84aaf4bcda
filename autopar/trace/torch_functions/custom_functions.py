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
from autopar.trace.compat import torch_internals

__all__ = ["NAMESPACE", "call_as_op"]

NAMESPACE = "autopar_function"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = (
    bool, int, float, complex, str, bytes, slice, enum.Enum, torch.dtype, torch.device, torch.layout,
    torch.memory_format, type(None),
)  # fmt: skip
_APPLY = torch.autograd.Function.__dict__["apply"]  # tracing replaces it for a while


Results = Tensor | tuple[Tensor, ...]


class _Hole:
    """Where a tensor was."""

    def __repr__(self) -> str:
        return "Tensor"


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
    """

    name: str
    function: type
    leaves: tuple[Any, ...]
    structure: Any
    returned: tuple[Any, ...] = ()
    returned_structure: Any = None

    def register(self, tensors: Sequence[Tensor]) -> None:
        """Make the op; a run on fake tensors like `tensors` shows what it returns."""
        with torch_internals.untraced() as mode:
            self._run_alone(*(torch_internals.fake_tensor(mode, x) for x in tensors))
        args = ", ".join(f"Tensor x{index}" for index in range(len(tensors)))
        results = ["Tensor"] * self.returned.count(_HOLE)
        _LIBRARY.define(f"{self.name}({args}) -> ({', '.join(results)})")
        _LIBRARY.impl(self.name, self._run_with_gradient, "Autograd")
        _LIBRARY.impl(self.name, self._run_alone, "CompositeExplicitAutograd")
        library: Any = torch.library
        library.register_fake(f"{NAMESPACE}::{self.name}", self._run_alone, lib=_LIBRARY)

    def run(self, tensors: Sequence[Tensor]) -> Results:
        """The op's results."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name)(*tensors)

    def _run_with_gradient(self, *tensors: Tensor) -> Results:
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self._apply(tensors)
        with torch_internals.below_autograd():
            return self.run(tensors)

    def _run_alone(self, *tensors: Tensor) -> Results:
        with torch.no_grad():
            return self._apply(tensors)

    def _apply(self, tensors: Sequence[Tensor]) -> Results:
        versions = [x._version for x in tensors]
        args = torch_internals.unflatten(_filled(self.leaves, tensors), self.structure)
        leaves, structure = torch_internals.flatten(_APPLY.__get__(None, self.function)(*args))
        if versions != [x._version for x in tensors]:
            raise TraceError(
                f"{self.function.__qualname__}, a custom torch.autograd.Function, writes to its argument in place: "
                "let it return a new tensor (work on x.clone(), without ctx.mark_dirty)"
            )
        self.returned = tuple(_HOLE if isinstance(x, Tensor) else x for x in leaves)
        self.returned_structure = structure
        memory = {torch_internals.storage_key(x) for x in tensors}
        own = (x for x in leaves if isinstance(x, Tensor))
        # A functional op returns no views of its operands.
        results = tuple(x.clone() if torch_internals.storage_key(x) in memory else x for x in own)
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
