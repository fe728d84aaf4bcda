"""A call of a function of torch with DTensors of parallel modules among its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.communication.late_tensor import LateTensor
from autopar.lower.compat import map_leaves
from autopar.lower.parameters.known_meshes import is_known, read_whole

__all__ = ["FunctionCall", "find_tensors", "has_no_rule", "is_known_dtensor", "plain"]

_NO_RULE = ("DTensor", "sharding", "Sharding", "placement", "tensor subclass", "redistribut")
"""What torch's errors say where a function has no rule for DTensors, or none for how these lie."""


@dataclass(frozen=True)
class FunctionCall:
    """``function(*args, **kwargs)``.

    Attributes:
        tensors: all among its arguments, also those in lists.
        known: those that are DTensors of parallel modules, one at least.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: list[Tensor]
    known: list[DTensor]

    @cached_property
    def name(self) -> str:
        """The function's: ``"add_"``, ``"__getitem__"``."""
        return getattr(self.function, "__name__", "")

    def natively(self) -> Any:
        """What torch makes of it."""
        return self.function(*self.args, **self.kwargs)

    def with_leaves(self, change: Callable[[Any], Any], first: int = 0) -> Any:
        """The same with ``change(x)`` in place of each argument from number `first` on, in lists, too."""
        args, kwargs = map_leaves(change, (self.args[first:], dict(self.kwargs)))
        return self.function(*self.args[:first], *args, **kwargs)

    def is_mixed(self) -> bool:
        """Whether torch's DTensor takes these arguments for an error: a plain tensor that is more than a number, or
        DTensors on several meshes.
        """
        mesh = self.known[0].device_mesh
        if any(isinstance(x, DTensor) and x.device_mesh != mesh for x in self.tensors):
            return True
        return len(self.known) < len(self.tensors) and any(_is_plain(x) for x in self.tensors)

    def plain_tensors(self) -> list[Tensor]:
        """The plain ones among its tensors, numbers left out; every rank reads them if they are outputs of a call."""
        plain = [x.whole() if isinstance(x, LateTensor) else x for x in self.tensors if not isinstance(x, DTensor)]
        return [x for x in plain if x.dim()]


def _is_plain(x: Tensor) -> bool:
    if isinstance(x, DTensor):
        return False
    return isinstance(x, LateTensor) or x.dim() > 0 or (x.requires_grad and torch.is_grad_enabled())


def find_tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among `values`, in lists and tuples, too."""
    tensors: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, list | tuple):
            tensors += find_tensors(cast("Iterable[Any]", x))
    return tensors


def is_known_dtensor(x: Any) -> bool:
    """Whether it is a DTensor of a parallel module."""
    return isinstance(x, DTensor) and is_known(x)


def plain(x: Any) -> Any:
    """The whole plain tensor that a DTensor of a parallel module, or an output of one, stands for."""
    if isinstance(x, LateTensor):
        return x.whole()
    return read_whole(x) if isinstance(x, DTensor) and is_known(x) else x


def has_no_rule(error: Exception) -> bool:
    """Whether torch raised it as it can't split the function."""
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in _NO_RULE)
