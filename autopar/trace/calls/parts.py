"""A submodule as a model of its own, whose parameters have the names that they have in the whole model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["as_model"]


class _Submodule(nn.Module):
    """Has all parameters, buffers and submodules of `whole`, and is called as its submodule `name`."""

    def __init__(self, whole: nn.Module, name: str) -> None:
        super().__init__()
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            vars(self)[table] = vars(whole)[table]
        self.training = whole.training
        self.part = name

    @property
    def forward(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The submodule with its hooks, and the signature of its forward."""
        module = self.get_submodule(self.part)

        def call(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        call.__signature__ = inspect.signature(module.forward)  # pyright: ignore[reportFunctionMemberAccess]
        return call


def as_model(whole: nn.Module, part: str) -> nn.Module:
    """`whole` itself for ``""``; else a module that is called as the submodule `part` of it, and shares its tensors."""
    return _Submodule(whole, part) if part else whole
