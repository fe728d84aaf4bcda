"""FlashAttention's custom ops as plain mathematics, for machines without the package (it needs a GPU).

Same names, arguments and results as the package's own, so that the rules for them can be run.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention import varlen

__all__ = ["define_ops"]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, slopes: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Tensors [batch, seq, heads, dim]; returns out and the log-sum-exp [batch, heads, seq]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if slopes is not None:
        place = torch.arange(q.shape[1])
        scores = scores - slopes.view(-1, slopes.shape[-1], 1, 1) * (place[:, None] - place).abs()
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def _extras(q: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty((0,)), torch.zeros(2, dtype=torch.int64)


def _forward(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax):
    return *_attend(q, k, v, softmax_scale, causal, alibi_slopes), *_extras(q)


def _varlen_forward(q, k, v, starts_q, starts_k, max_q, max_k, dropout_p, softmax_scale, causal):
    parts = [
        _attend(q[None, a:b], k[None, a:b], v[None, a:b], softmax_scale, causal, None) for a, b in pairwise(starts_q)
    ]
    return torch.cat([p[0][0] for p in parts]), torch.cat([p[1][0] for p in parts], -1), *_extras(q)


def _packed(query, key, value, ends_q, ends_k, max_q, max_k, causal=False, scale=None, *_):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result, statistics, *_ = _varlen_forward(query, key, value, ends_q, ends_k, max_q, max_k, 0.0, scale, causal)
    return result, statistics, torch.zeros(2, dtype=torch.uint64)


def _packed_backward(gradient, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, causal, state, scale=None, *_):
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for start, stop in pairwise(ends_q):
        part = slice(start, stop)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part]) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        shares, of_shares = scores.softmax(-1), torch.einsum("qhd,khd->hqk", gradient[part], v[part])
        of_scores = scale * shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
        gradients[0][part] = torch.einsum("hqk,khd->qhd", of_scores, k[part])
        gradients[1][part] = torch.einsum("hqk,qhd->khd", of_scores, q[part])
        gradients[2][part] = torch.einsum("hqk,qhd->khd", shares, gradient[part])
    return tuple(gradients)


def define_ops() -> None:
    """Define ``flash_attn::*`` unless the package has done so; differentiable by the mathematics above."""
    if not _KEEP:
        for op, kernel in ((varlen._varlen_attn, _packed), (varlen._varlen_attn_backward, _packed_backward)):
            op.register_kernel("cpu")(kernel)
    if hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
        return
    library = torch.library.Library("flash_attn", "FRAGMENT")
    results = "-> (Tensor, Tensor, Tensor, Tensor)"
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, "
        "bool causal, int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, "
        f"bool return_softmax) {results}"
    )
    library.define(
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        f"int max_seqlen_q, int max_seqlen_k, float dropout_p, float softmax_scale, bool causal) {results}"
    )
    library.impl("_flash_attn_forward", _forward, "CompositeImplicitAutograd")
    library.impl("_flash_attn_varlen_forward", _varlen_forward, "CompositeImplicitAutograd")
    _KEEP.append(library)


_KEEP: list[torch.library.Library] = []  # a library's ops vanish with the object
