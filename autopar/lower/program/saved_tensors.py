"""A tensor that autograd saved, or how to compute it again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Recipe", "SavedTensor"]

Recipe = Callable[[], Tensor]
"""Gives a tensor that was let go."""


class SavedTensor:
    """What a hook for saved tensors gives to autograd in place of a tensor."""

    __slots__ = ("__weakref__", "recipe", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        """Keep `tensor`."""
        self.tensor: Tensor | None = tensor
        self.recipe: Recipe | None = None

    def open(self) -> Tensor:
        """The tensor."""
        if self.tensor is not None:
            return self.tensor
        assert self.recipe is not None
        return self.recipe()

    def let_go(self, owner: Recipe) -> None:
        """Drop the tensor; it is a view of what `owner` gives."""
        assert self.tensor is not None
        size, stride, offset = self.tensor.size(), self.tensor.stride(), self.tensor.storage_offset()
        self.recipe = lambda: torch.as_strided(owner(), size, stride, offset)
        self.tensor = None
