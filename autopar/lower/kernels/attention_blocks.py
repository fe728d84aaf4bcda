"""Attention of some queries to some keys, with the statistics to join several such blocks.

The softmax of a row over all keys is the sum of those over parts of the keys, each weighted by its share of the sum of
exponentials; so a block gives the logarithm of its own sum.  Backward, a block that is told the result over all keys
and the logarithm of the whole sum gives its own terms of the gradients.
Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Block", "attend_block", "block_gradients", "empty_block", "join_blocks", "packed", "score_scale", "sum_dtype",
    "unpacked",
]  # fmt: skip

_aten: Any = torch.ops.aten  # these ops are how torch's own attention is split in forward and backward
_FLASH_MOST = 256
"""The largest head that FlashAttention supports."""
_FLASH_UNIT = 8
"""Sizes of heads must be multiples of this; others are padded, as torch's own attention does."""
_EFFICIENT_UNIT = 32
"""The memory-efficient kernel pads its logarithms to a multiple of so many rows (``kAlignLSE`` in torch's source)."""


class Block(NamedTuple):
    """The result of a block, ``[batch, heads, rows, size of a value]``, and per row the logarithm of its sum of
    exponentials, ``[batch, heads, rows]``, in float32 or float64.
    """

    out: Tensor
    log_sum: Tensor


def empty_block(query: Tensor, value: Tensor, dtype: torch.dtype) -> Block:
    """The attention of each row of `query` ``[..., size]`` to nothing, to join blocks to; its result in `dtype`."""
    rows = query.shape[:-1]
    return Block(
        query.new_zeros(*rows, value.shape[-1], dtype=dtype), query.new_full(rows, -torch.inf, dtype=sum_dtype(query))
    )


def score_scale(query: Tensor, scale: float | None) -> float:
    """What scores are multiplied by: `scale`, by default one over the root of the size of a head."""
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def sum_dtype(x: Tensor) -> torch.dtype:
    """What blocks of `x` are summed up in: float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def attend_block(query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool) -> Block:
    """Attention of ``[batch, heads, rows, size]`` to ``[batch, heads or fewer, columns, size]``.

    Args:
        query: the rows.
        key: the columns; where it has fewer heads, each serves as many neighboring ones of `query`.
        value: of the columns.
        scale: of the scores.
        is_causal: each row sees the columns up to its own; there are as many rows as columns.
    """
    kernel = _kernel(query, value)
    if kernel == "flash":
        q, k, v = (_padded(x) for x in (query, key, value))
        result = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
        return Block(result[0][..., : value.shape[-1]], result[1])
    k, v = _repeated(key, query), _repeated(value, query)
    if kernel == "efficient":
        out, log_sum, *_ = _aten._scaled_dot_product_efficient_attention(
            query, k, v, None, True, 0.0, is_causal, scale=scale
        )
        return Block(out, log_sum[..., : query.shape[-2]])
    if kernel == "cpu":
        return Block(*_aten._scaled_dot_product_flash_attention_for_cpu(query, k, v, 0.0, is_causal, scale=scale))
    scores = _scores(query, k, scale, is_causal=is_causal)
    log_sum = scores.logsumexp(-1)
    return Block(((scores - log_sum.unsqueeze(-1)).exp_() @ v.to(scores.dtype)).to(query.dtype), log_sum)


def block_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's terms of the gradients of its `query`, `key` and `value`.

    Args:
        gradient: of the rows' result over all their keys.
        query: as in `attend_block`, as are `key`, `value`, `scale` and `is_causal`.
        whole: the result over all keys of the rows.
    """
    kernel = _kernel(query, value)
    if kernel == "flash":
        return _flash_gradients(gradient, query, key, value, whole, scale, is_causal=is_causal)
    k, v = _repeated(key, query), _repeated(value, query)
    if kernel == "efficient":
        rows = query.shape[-2]
        log_sum = torch.nn.functional.pad(whole.log_sum, (0, -rows % _EFFICIENT_UNIT), value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        for_q, for_k, for_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, k, v, None, whole.out, log_sum, seed, seed, 0.0, [True, True, True, False], is_causal,
            scale=scale,
        )  # fmt: skip
    elif kernel == "cpu":
        for_q, for_k, for_v = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, k, v, *whole, 0.0, is_causal, scale=scale
        )
    else:
        for_q, for_k, for_v = _plain_gradients(gradient, query, k, v, whole, scale, is_causal=is_causal)
    return for_q, _joined_heads(for_k, key), _joined_heads(for_v, value)


def join_blocks(first: Block, second: Block) -> Block:
    """The result over the columns of both blocks, of the same rows."""
    log_sum = torch.logaddexp(first.log_sum, second.log_sum)
    shares = [(each.log_sum - log_sum).exp_().unsqueeze(-1) for each in (first, second)]
    out = torch.addcmul(second.out * shares[1], first.out, shares[0])
    return Block(out.to(first.out.dtype), log_sum)


def _kernel(query: Tensor, value: Tensor) -> str:
    """What runs a block: a fast kernel of torch's, or plain products."""
    is_narrow = query.dtype in (torch.float16, torch.bfloat16)
    if query.device.type == "cpu":
        return "cpu" if query.shape[-1] == value.shape[-1] else "plain"
    if query.device.type != "cuda" or not (is_narrow or query.dtype is torch.float32):
        return "plain"
    return "flash" if is_narrow and query.shape[-1] == value.shape[-1] <= _FLASH_MOST else "efficient"


def _padded(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % _FLASH_UNIT)) if x.shape[-1] % _FLASH_UNIT else x


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """With as many heads as `query`."""
    times = query.shape[1] // x.shape[1]
    return x.repeat_interleave(times, 1) if times > 1 else x


def _joined_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x` from that of `_repeated`."""
    times = gradient.shape[1] // x.shape[1]
    return gradient.reshape(*x.shape[:2], times, *x.shape[2:]).sum(2) if times > 1 else gradient


def _flash_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, g = (_padded(x) for x in (query, key, value, whole.out, gradient))
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # not read without dropout
    results = _aten._scaled_dot_product_flash_attention_backward(
        g, q, k, v, out, whole.log_sum, None, None, q.shape[-2], k.shape[-2], 0.0, is_causal, seed, seed, scale=scale
    )
    for_q, for_k, for_v = (x[..., : query.shape[-1]] for x in results)
    return for_q, _joined_heads(for_k, key), _joined_heads(for_v, value)


def _scores(query: Tensor, key: Tensor, scale: float, *, is_causal: bool) -> Tensor:
    """In float32 at least; minus infinity where a row sees nothing."""
    dtype = sum_dtype(query)
    scores = (query.to(dtype) @ key.to(dtype).mT).mul_(scale)
    if is_causal:
        rows = scores.shape[-1]
        hidden = torch.ones(rows, rows, dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _plain_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Block, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(query, key, scale, is_causal=is_causal)
    g, out, v = (x.to(scores.dtype) for x in (gradient, whole.out, value))
    weights = (scores - whole.log_sum.unsqueeze(-1)).exp_()
    for_scores = weights * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
    results = for_scores @ key.to(scores.dtype), for_scores.mT @ query.to(scores.dtype), weights.mT @ g
    for_q, for_k, for_v = (x.to(query.dtype) for x in results)
    return for_q, for_k, for_v


def packed(first: Tensor, second: Tensor) -> Tensor:
    """Both, flat and one after the other, to travel as one."""
    return torch.cat([first.reshape(-1), second.reshape(-1)])


def unpacked(flat: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """What was `packed` of tensors of these shapes."""
    size = first.numel()
    return flat[:size].view(first.shape), flat[size:].view(second.shape)
