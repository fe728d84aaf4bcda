"""What ``half()``, ``to()`` and the like would make of a module's tensors, without making it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["TensorKind", "first_conversion"]


class TensorKind(NamedTuple):
    """What a conversion changes of a tensor."""

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> TensorKind:
        """Of a tensor."""
        return cls(x.dtype, x.device)

    def __str__(self) -> str:
        """For messages."""
        return f"{self.dtype} on {self.device}"


def first_conversion(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> tuple[TensorKind, TensorKind] | None:
    """What the first parameters or buffers of `module` are that `fn`, as modules call it for each of their tensors,
    would change, and what they would be; None if it changes none.
    """
    for kind in dict.fromkeys(map(TensorKind.of, (*module.parameters(), *module.buffers()))):
        made = TensorKind.of(fn(torch.zeros(1, dtype=kind.dtype, device=kind.device)))
        if made != kind:
            return kind, made
    return None
