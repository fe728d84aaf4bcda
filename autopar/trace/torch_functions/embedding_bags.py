"""``F.embedding_bag`` of bags of one size (``nn.EmbeddingBag`` on ``[bags, ids]``), written as rows and their sum.

Torch's op takes all ids in one list, with the places where bags begin: nothing of it is the batch, which devices share
and microbatches slice.  Rows that are looked up and added up along a dim have one.  Each bag's sum is the same, but for
the order in which it is added.  Bags of unlike sizes, and maxima, whose gradients differ where rows are equal, are
left to the op.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn import functional

__all__ = ["written_embedding_bags"]


def written_embedding_bags() -> contextlib.AbstractContextManager[Any]:
    """Inside, ``F.embedding_bag`` looks up rows and adds them up."""
    kernel: Any = functional.embedding_bag
    replaced = update_wrapper(partial(_bags, kernel, inspect.signature(kernel)), kernel)
    return patch.object(functional, "embedding_bag", replaced)


def _bags(kernel: Callable[..., Any], signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> Any:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    call: Any = SimpleNamespace(**bound.arguments)
    ids, weights, padding = call.input, call.per_sample_weights, call.padding_idx
    is_usual = call.offsets is None and call.max_norm is None and not call.scale_grad_by_freq
    if not is_usual or call.mode not in ("sum", "mean") or ids.dim() != 2 or not ids.shape[1]:
        return kernel(*args, **kwargs)
    if weights is not None and (call.mode != "sum" or weights.shape != ids.shape):
        return kernel(*args, **kwargs)  # which says what is wrong
    rows: Tensor = functional.embedding(ids, call.weight, padding)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if padding is None:
        return rows.sum(1) if call.mode == "sum" else rows.mean(1)
    counts = ids != padding % call.weight.shape[0]
    total = (rows * counts.unsqueeze(-1)).sum(1)
    return total if call.mode == "sum" else total / counts.sum(1, keepdim=True).clamp(min=1)
