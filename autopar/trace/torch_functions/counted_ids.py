"""Counts of ids, as routers take them: ``torch.bincount`` with `minlength`, whose result's length depends on values.

A trace takes that length for `minlength`.  An id beyond it is then an index error when the program runs, where torch
would have returned a longer tensor.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

__all__ = ["counts_of_known_length"]


@contextmanager
def counts_of_known_length() -> Generator[None]:
    """Inside, ``torch.bincount(ids, minlength=n)`` returns n counts; without `minlength` it stays as it is."""
    plain = torch.bincount

    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if not minlength:
            return plain(input, weights, minlength)
        if weights is None:
            added = torch.ones_like(input, dtype=torch.int64)
        else:
            added = weights if weights.dtype == torch.float32 else weights.double()  # as torch does
        return added.new_zeros(minlength).scatter_add(0, input.long(), added)

    with patch.object(torch, "bincount", bincount), patch.object(Tensor, "bincount", bincount):
        yield
