"""Reads and writes past autograd: ``x.data``, and what is written in place where no gradients are recorded.

An export takes ``x.data`` for a constant of the code, whose values are then those of no tensor, and drops
``x.data = y``.  Both are written here with ops that it does see: ``x.detach()``, which shares memory with `x`, too.

Where `x` has a gradient, autograd sends it past what is written to ``x.data``, ``x.detach()``, or x itself under
``torch.no_grad()``: to where x came from.  A program without writes can't say that, so it is refused if x is read
again or returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.objects.tensor_questions import QUESTIONS
from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import user_line

__all__ = ["PastAutograd"]

_tensor: Any = Tensor
_READ, _WRITE = _tensor.data.__get__, _tensor.data.__set__
_DETACH = (Tensor.detach, torch.detach)
_OPERATORS = frozenset(
    f"__{x}__" for x in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "iand", "ior")
)


class PastAutograd(TorchFunctionMode):
    """In this context, ``x.data`` is ``x.detach()``, and ``x.data = y`` writes y's values there."""

    def __init__(self, *, training: bool) -> None:
        """Nothing has been written yet; outside of `training`, gradients may be lost."""
        super().__init__()
        self._training = training
        self._bases: dict[int, Tensor] = {}  # by memory: results with a gradient that others may write to without it
        self._written: dict[int, str] = {}  # those of them that were: the user's lines

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives.

        Raises:
            TraceError: ``x.data = y`` with a `y` of another shape or dtype, or a read of a tensor with a gradient after
                something was written there past it.
        """
        del types
        given = kwargs or {}
        if func in QUESTIONS:
            return func(*args, **given)
        reads_past = func == _READ or func in _DETACH
        if reads_past or self._written or not torch.is_grad_enabled():
            self._note_reads([x for x in torch_internals.flatten((args, given))[0] if isinstance(x, Tensor)])
        if func == _READ:
            return args[0].detach()
        if func == _WRITE:
            self._note_reads(args[:1])
            _check_same(*args)
        if func == _WRITE or _writes(func):
            self._note_write(args[0], past=func == _WRITE)
        return _replace(*args) if func == _WRITE else func(*args, **given)

    def check_returned(self, tensors: Sequence[Tensor]) -> None:
        """Raise TraceError if one that forward returns was written to past its gradient, which is as if it was read."""
        self._note_reads(tensors)

    def _note_reads(self, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            if x.grad_fn is None or not torch_internals.has_storage(x):
                continue
            memory = torch_internals.storage_key(x)
            self._bases[memory] = x
            if self._training and memory in self._written:
                raise TraceError(
                    f"{self._written[memory]}: writes in place to a tensor that has a gradient, past autograd (under "
                    "torch.no_grad(), or by .data or detach()), which is read again or returned: its gradient would "
                    "pass by what is written, which a program can't express; write x = x + (new - x).detach()"
                )

    def _note_write(self, x: Any, *, past: bool) -> None:
        if not isinstance(x, Tensor) or not torch_internals.has_storage(x):
            return
        if past or not x.requires_grad or not torch.is_grad_enabled():
            memory = torch_internals.storage_key(x)
            if memory in self._bases:
                self._written[memory] = user_line()


def _writes(func: Any) -> bool:
    """Whether it writes to its first argument."""
    name: str = getattr(func, "__name__", "")
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


def _check_same(x: Tensor, y: Tensor) -> None:
    if x.shape != y.shape or x.dtype != y.dtype:
        raise TraceError(
            f"{user_line()}: .data = ... gives a tensor of {x.dtype} {list(x.shape)} values of {y.dtype} "
            f"{list(y.shape)}, but a program has fixed shapes: work on a new tensor"
        )


def _replace(x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        x.detach().copy_(y)
