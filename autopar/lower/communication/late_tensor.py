"""A tensor that is cut over the ranks, and becomes a whole plain tensor when it is first read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from autopar.lower.compat import make_wrapper, map_leaves
from autopar.objects.tensor_questions import QUESTIONS

__all__ = ["LateTensor"]

_FACTS = QUESTIONS - {Tensor.stride}
"""What can be told without reading it."""


class LateTensor(Tensor):
    """Stands for a whole tensor, which is gathered from the ranks when a function of torch first gets it.

    That is a collective: every rank must read the same outputs, in the same order.  What is computed of it is a plain
    tensor, and carries gradients as the whole tensor does.
    """

    _gather: Callable[[], Tensor]
    _gathered: Tensor | None

    @classmethod
    def of(cls, like: Tensor, gather: Callable[[], Tensor]) -> Self:
        """A stand-in with the shape, dtype and device of `like`, which may be without memory, for ``gather()``."""
        made = make_wrapper(cls, like)
        made._gather, made._gathered = gather, None
        return made

    def then(self, view: Callable[[Tensor], Tensor]) -> LateTensor:
        """``view(...)`` of the whole tensor, once that is read."""
        like = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return LateTensor.of(view(like).requires_grad_(self.requires_grad), lambda: view(self.whole()))

    def followed_by(self, action: Callable[[Tensor], Tensor]) -> LateTensor:
        """``action(...)`` of the whole tensor, of the same shape, once that is read."""
        like = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
        return LateTensor.of(like.requires_grad_(self.requires_grad), lambda: action(self.whole()))

    def whole(self) -> Tensor:
        """The whole tensor; the first time every rank must call it."""
        if self._gathered is None:
            self._gathered = self._gather()
            self._gather = lambda: self.whole()  # lets go of this rank's part
        return self._gathered

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func` of whole tensors."""
        if func in _FACTS:
            untyped: Any = super()
            return untyped.__torch_function__(func, types, args, kwargs or {})
        plain = map_leaves(_whole, (tuple(args), dict(kwargs or {})))
        return func(*plain[0], **plain[1])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The same for callers that pass by ``__torch_function__``, without gradients."""
        plain = map_leaves(_whole, (tuple(args), dict(kwargs or {})))
        return func(*plain[0], **plain[1])


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, LateTensor) else x
