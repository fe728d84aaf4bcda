"""Which attributes of its modules a forward reads: numbers, flags, words and tensors that a script may set later."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["recorded_reads"]

_KINDS = frozenset({bool, int, float, complex, str, type(None), torch.dtype, tuple, Tensor})


@contextmanager
def recorded_reads(model: nn.Module) -> Generator[set[tuple[str, str]]]:
    """Inside, what is read of `model` and its submodules that is neither a parameter nor a buffer, nor an object.

    The set that it gives has (path of the module, attribute) when the context has ended.
    """
    seen: set[tuple[int, str]] = set()
    reads: set[tuple[str, str]] = set()

    def read(self: nn.Module, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if type(value) in _KINDS:
            seen.add((id(self), name))
        return value

    before = vars(nn.Module).get("__getattribute__", object.__getattribute__)
    nn.Module.__getattribute__ = read
    try:
        yield reads
    finally:
        nn.Module.__getattribute__ = before
        modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        for path, module in modules:
            reads.update((path, name) for name in vars(module) if (id(module), name) in seen)
