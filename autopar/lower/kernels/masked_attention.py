"""torch's attention, with the mask in the dtype of the query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["attention"]


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
) -> Tensor:
    """``aten.scaled_dot_product_attention`` with a mask in the dtype of `query`.

    torch takes float32 masks whatever the others' dtype, but on the CPU (seen on 2.13) it reads them as float64 where
    the others are: a wrong result without an error.
    """
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(query.dtype)
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, attn_mask, *args, **kwargs)
