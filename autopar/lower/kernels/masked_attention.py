"""torch's attention, called so that on every device a fast kernel can run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.ops.attention import shares_heads

__all__ = ["attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    enable_gqa: bool = False,
    **kwargs: Any,
) -> Tensor:
    """``aten.scaled_dot_product_attention`` with a mask in the dtype of `query`.

    torch takes float32 masks whatever the others' dtype, but on the CPU (seen on 2.13) it reads them as float64 where
    the others are: a wrong result without an error.

    On GPUs torch falls back to plain products, which keep all scores, where the last dim of a mask has gaps, and where
    no fast kernel lets heads share keys and values.  So masks are made contiguous, and keys and values repeated.
    """
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(query.dtype)
    if query.device.type != "cpu":
        if attn_mask is not None and attn_mask.stride(-1) != 1:
            attn_mask = attn_mask.contiguous()
        dtype = str(query.dtype).removeprefix("torch.")
        if enable_gqa and not shares_heads(dtype, has_mask=attn_mask is not None):
            repeats, enable_gqa = query.shape[-3] // key.shape[-3], False
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    return torch.ops.aten.scaled_dot_product_attention.default(
        query, key, value, attn_mask, *args, **kwargs, enable_gqa=enable_gqa
    )
