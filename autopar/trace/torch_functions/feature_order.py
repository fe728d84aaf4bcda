"""Features of images that come in another order than the places for them in the text.

``text.masked_scatter(mask, features)`` puts row i of the features at the i-th place of the mask, so features must be in
the order of the text.  With an argument `FEATURE_ORDER` of the call, ``[rows, tokens]``, the i-th place of a row of
text gets the features that entry i of the same row of it names, so that features may be in any order:

    where(mask, embedding(order[row, i], features), text)

`autopar.balanced` passes it where images of several sizes are grouped by size.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.trace.compat.source_lines import user_line

__all__ = ["FEATURE_ORDER", "features_in_order", "put_rows"]

FEATURE_ORDER = "feature_order"
"""The keyword argument of a call, which forward doesn't see."""

_MASKED_SCATTER = (Tensor.masked_scatter, torch.masked_scatter)
_WRITES = (
    Tensor.__setitem__, Tensor.masked_scatter_, Tensor.index_put, Tensor.index_put_, torch.index_put, torch.index_put_,
)  # fmt: skip
"""What may put rows in the order of a mask as well, and isn't replaced."""


class _CurrentOrder:
    """The order that a call under way has, and how many times it was used."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self.uses = 0


_current: ContextVar[_CurrentOrder | None] = ContextVar("feature_order", default=None)


@contextmanager
def features_in_order(order: Tensor | None) -> Generator[None]:
    """Inside, ``masked_scatter`` reads its source in this `order`, ``[rows, tokens]``; None: as it is.

    Raises:
        TraceError: nothing that is called inside puts features in a text.
    """
    if order is None:
        yield
        return
    known = _CurrentOrder(order)
    token = _current.set(known)
    try:
        with _MaskedScatters():
            yield
    finally:
        _current.reset(token)
    if not known.uses:
        raise TraceError(
            "images of several sizes come in groups of one size, but forward puts no features of images in its text by "
            "masked_scatter, so the order in which it reads them is not known: make batches of images of one size, "
            "with autopar.data.BucketSampler"
        )


def put_rows(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``x.masked_scatter(mask, source)``, which reads `source` in the order of `features_in_order`.

    Raises:
        TraceError: with an order, `x` is no text ``[rows, tokens, width]`` with features ``[n, width]``.
    """
    known = _current.get()
    if known is None:
        return x.masked_scatter(mask, source)
    order = known.numbers
    is_by_row = mask.dim() == x.dim() and (mask.shape[-1] == 1 or mask.stride(-1) == 0)
    if x.dim() != 3 or x.shape[:2] != order.shape or source.shape[1:] != x.shape[2:] or not is_by_row:
        raise TraceError(
            f"{user_line()}: masked_scatter of {list(source.shape)} in {list(x.shape)} with a mask "
            f"{list(mask.shape)}: features of images of several sizes are put in text [rows, tokens, width], here "
            f"{list(order.shape)}, row by row. Make batches of images of one size, with autopar.data.BucketSampler"
        )
    known.uses += 1
    chosen = mask[..., 0].expand(order.shape)
    number = chosen.cumsum(1) - 1
    named = order.gather(1, number.clamp(min=0))
    features = functional.embedding(torch.where(chosen, named, torch.zeros_like(named)), source)
    return torch.where(chosen[..., None], features, x)


class _MaskedScatters(TorchFunctionMode):
    """In this context ``masked_scatter`` is `put_rows`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives."""
        del types
        given = kwargs or {}
        if func in _MASKED_SCATTER:
            return put_rows(*args, **given)
        if func in _WRITES and _has_mask(args) and any(isinstance(x, Tensor) and x.dim() for x in args[2:]):
            raise TraceError(
                f"{user_line()}: what is written where a mask is comes in the order of the text, but images of several "
                "sizes come in groups of one size: use masked_scatter, or make batches of images of one size, with "
                "autopar.data.BucketSampler"
            )
        return func(*args, **given)


def _has_mask(args: Sequence[Any]) -> bool:
    indices = cast("Sequence[Any]", args[1]) if isinstance(args[1], tuple | list) else (args[1],)
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in indices)
