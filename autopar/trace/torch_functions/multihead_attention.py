"""``F.multi_head_attention_forward`` (``nn.MultiheadAttention``, ``nn.Transformer``) with the batch in front.

Torch's function computes on ``[tokens, batch * heads, head]`` and ``[tokens * batch, features]``: the batch, which
devices share and microbatches slice, is the first dim of none of its tensors.  This one computes the same on
``[batch, heads, tokens, head]``.  What modules with ``batch_first=True`` turn around for torch's function is turned
back here, and both cancel.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["batch_first_attention"]

_Call = Any
"""The arguments of torch's function, by name."""


def batch_first_attention() -> contextlib.AbstractContextManager[Any]:
    """Inside, ``F.multi_head_attention_forward`` has the batch in front."""
    kernel: Any = functional.multi_head_attention_forward
    signature = inspect.signature(kernel)
    # With the kernel's name, which torch reads of all its functions.
    replaced = update_wrapper(partial(_forward, kernel, signature), kernel)
    return patch.object(functional, "multi_head_attention_forward", replaced)


def _forward(kernel: Callable[..., Any], signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> Any:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    call: _Call = SimpleNamespace(**bound.arguments)
    if not _is_plain(call):
        return kernel(*args, **kwargs)
    query, key, value = _projected(call)
    rows, _, features = query.shape
    shape = (call.num_heads, features // call.num_heads)
    q, k, v = (x.view(*x.shape[:2], *shape).transpose(1, 2) for x in (query, key, value))
    dropout_p = call.dropout_p if call.training else 0.0
    is_causal = call.is_causal and call.key_padding_mask is None and not call.need_weights
    mask = None if is_causal else _mask(call, query.dtype, rows)
    if call.need_weights:
        scores = (q * (1.0 / shape[1]) ** 0.5) @ k.transpose(-2, -1)
        weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = functional.dropout(weights, dropout_p) if dropout_p else weights
        made = weights @ v
    else:
        weights = None
        made = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    made = functional.linear(made.transpose(1, 2).flatten(2), call.out_proj_weight, call.out_proj_bias)
    if weights is not None and call.average_attn_weights:
        weights = weights.mean(dim=1)
    return made.transpose(0, 1), weights


def _is_plain(call: _Call) -> bool:
    """Whether it is a batch, with right arguments, without what the others rarely have: torch's function tells more."""
    query, key, value, mask, padding = call.query, call.key, call.value, call.attn_mask, call.key_padding_mask
    extra = (call.bias_k, call.bias_v, call.static_k, call.static_v)
    if call.add_zero_attn or any(x is not None for x in extra) or any(x.dim() != 3 for x in (query, key, value)):
        return False
    length, rows, features = query.shape
    sizes = (length, key.shape[0])
    is_right = key.shape[1] == rows and key.shape[:2] == value.shape[:2] and features % call.num_heads == 0
    is_projected = call.use_separate_proj_weight or key.shape == value.shape
    is_masked = mask is None or mask.shape in (sizes, (rows * call.num_heads, *sizes))
    is_padded = padding is None or padding.shape == (rows, sizes[1])
    is_typed = all(x is None or x.dtype == torch.bool or x.is_floating_point() for x in (mask, padding))
    is_expected = features == call.embed_dim_to_check and (mask is not None or not call.is_causal)
    return is_right and is_projected and is_masked and is_padded and is_typed and is_expected


def _projected(call: _Call) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[batch, tokens, features]``."""
    turned = {id(x): x.transpose(0, 1) for x in (call.query, call.key, call.value)}
    query, key, value = (turned[id(x)] for x in (call.query, call.key, call.value))
    weight, bias = call.in_proj_weight, call.in_proj_bias
    features = query.shape[-1]
    if call.use_separate_proj_weight:
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
    elif query is key is value:
        return cast("Any", functional.linear(query, weight, bias).chunk(3, dim=-1))
    elif key is value:
        biases: Any = (None, None) if bias is None else bias.split((features, 2 * features))
        first, rest = weight.split((features, 2 * features))
        keys, values = functional.linear(key, rest, biases[1]).chunk(2, dim=-1)
        return functional.linear(query, first, biases[0]), keys, values
    else:
        weights = weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    made = (functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    return cast("Any", tuple(made))


def _mask(call: _Call, dtype: torch.dtype, rows: int) -> Tensor | None:
    """What is added to scores, ``[1 or batch, 1 or heads, 1 or queries, keys]``."""
    mask, padding = (_added(x, dtype) for x in (call.attn_mask, call.key_padding_mask))
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask.view(rows, call.num_heads, *mask.shape[1:])
    if padding is not None:
        padding = padding[:, None, None]
    return padding if mask is None else mask if padding is None else mask + padding


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
