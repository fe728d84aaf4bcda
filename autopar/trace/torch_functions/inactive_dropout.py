"""Dropout that drops nothing, which gives the tensor that it is given.

So torch says where a model is called; an export has an op there, whose result is another tensor.  Who writes to either
of both (``h = self.dropout(x)``, ``h += y``) writes to both.  Where a model does, it is traced again as it is called.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

__all__ = ["dropout_as_asked", "inputs_of_dropout"]

_IS_GIVEN: ContextVar[bool] = ContextVar("is_given", default=False)

_ARGUMENTS = {F.dropout: ("input", "p", "training"), torch.dropout: ("input", "p", "train")}


@contextmanager
def inputs_of_dropout() -> Generator[None]:
    """Inside, a trace has inputs in place of what dropout gives where it drops nothing."""
    token = _IS_GIVEN.set(True)
    try:
        yield
    finally:
        _IS_GIVEN.reset(token)


def dropout_as_asked() -> AbstractContextManager[Any]:
    """For the forward of a trace: a mode in which `inputs_of_dropout` holds, or none."""
    return _InactiveDropout() if _IS_GIVEN.get() else nullcontext()


class _InactiveDropout(TorchFunctionMode):
    """In this context, dropout in evaluation, or with a probability of 0, gives its input."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        given = kwargs or {}
        if (names := _ARGUMENTS.get(func)) is not None:
            known = {**dict(zip(names, args, strict=False)), **given}
            x, p, training = (known.get(name) for name in names)
            is_probability = isinstance(p, int | float) and 0 <= p <= 1
            if isinstance(x, Tensor) and is_probability and (training is False or p == 0):
                return x
        return func(*args, **given)
