"""Ops with special kernels (see ``docs/architecture.md``), losses, and the ops of the FlashAttention
package.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import KernelCollective, Op
from autopar.rules.rule import Line, Rule, Types, argument
from autopar.rules.views import dim_names, without

__all__ = ["RULES"]


def _cross_entropy(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """cross_entropy(logits, target, weight, class_dim, ignore_index, label_smoothing, reduction)."""
    rank = len(operand_types[0].shape)
    given = argument(op, 3, "class_dim", 1)
    if not isinstance(given, int) or len(operand_types[1].shape) != rank - 1:
        return None
    class_dim = given % rank
    names = dim_names(rank)
    names[class_dim] = "v"
    positions = without(names, class_dim)
    logits, target = " ".join(names), " ".join(positions) or "()"
    remarks = "by v vocab_parallel_cross_entropy"
    is_sum = argument(op, 6, "reduction", "sum") == "sum"
    if is_sum and positions:
        remarks = f"sum {' '.join(positions)}, {remarks}"
    return Line(
        f"{logits}, target: {target}, weight: _ -> {'()' if is_sum else target} | {remarks}",
        collectives={
            "vocab_parallel_cross_entropy": _cross_entropy_collectives(op, class_dim, _sum_dtype(operand_types))
        },
    )


def _sum_dtype(operand_types: Types) -> str:
    """What the kernels communicate in."""
    return "float64" if operand_types[0].dtype == "float64" else "float32"


def _cross_entropy_collectives(op: Op, class_dim: int, dtype: str) -> tuple[KernelCollective, ...]:
    """Per position: the largest logit; then the sum of exponentials and the target's logit (and with label
    smoothing the sum of the logits)."""
    smoothing = argument(op, 5, "label_smoothing", 0.0)
    return (
        KernelCollective("all_reduce", "forward", 0, (class_dim,), dtype),
        KernelCollective("all_reduce", "forward", 0, (class_dim,), dtype, count=3 if smoothing else 2),
    )


def _batch_norm(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """batch_norm(x, weight, bias, running_mean, running_var, ...): statistics over batch and space need
    the kernel.
    """
    rank = len(operand_types[0].shape)
    names = dim_names(rank)
    names[1] = "c"
    spread = without(names, 1)
    x = " ".join(names)
    channel = (0, *range(2, rank))  # the dims that a tensor with one entry per channel lacks
    statistics = tuple(
        KernelCollective("all_reduce", phase, 0, channel, _sum_dtype(operand_types), count=2)
        for phase in ("forward", "backward")
    )
    remarks = ", ".join(f"by {factor} sync_batch_norm" for factor in spread)
    return Line(f"{x}, c, c, c, c -> {x}, c, c | {remarks}", collectives={"sync_batch_norm": statistics})


def _pointwise_loss(reduction_at: int) -> Rule:
    """A loss of elements: reduction 0 (none), 1 (mean, of the whole batch at once), 2 (sum)."""

    def rule(op: Op, operand_types: Types, result_types: Types) -> Line | None:
        reduction = argument(op, reduction_at, "reduction", 1)
        operands = ["*"] * reduction_at
        if reduction == 0:
            return Line(f"{', '.join(operands)} -> *")
        if reduction == 2:
            return Line(f"{', '.join(operands)} -> () | sum *") if _is_same_shape(operand_types) else None
        return Line(f"{', '.join(['...'] * reduction_at)} -> ()")

    return rule


def _is_same_shape(kinds: Types) -> bool:
    """With broadcasting, a slice of a summed dim could be missing from an operand that decides the
    result's size.
    """
    return len({kind.shape for kind in kinds}) == 1


def _flash_attention(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """(q, k, v, dropout_p, scale, causal, window, window, softcap, alibi_slopes, ...), tensors [batch,
    seq, heads, dim].

    Results: out, log-sum-exp [batch, heads, seq], a debug mask that is empty, and the generator's state.
    """
    tensor = "b _ h _"
    literals = ", #" * 6
    slopes = "b h" if len(operand_types) > 3 and len(operand_types[3].shape) == 2 else "h"
    return Line(
        f"{tensor}, {tensor}, {tensor}{literals}, {slopes} -> {tensor}, b h _, =..., =...",
        is_random=argument(op, 3, "dropout_p", 0.0) != 0.0,
    )


def _flash_attention_packed(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """The form for packed sequences: (q, k, v, starts_q, starts_k, ...), tensors [tokens, heads, dim];
    heads split.
    """
    return Line(
        "_ h _, _ h _, _ h _, _, _ -> _ h _, h _, =..., =...",
        is_random=argument(op, 7, "dropout_p", 0.0) != 0.0,
    )


RULES: Mapping[str, Rule] = {
    "autopar.dropout": Line("* -> *", is_random=True),
    "autopar.cross_entropy": _cross_entropy,
    "autopar.cross_entropy_denominator": Line("*, weight: _ -> () | sum *"),
    "autopar.batch_norm": _batch_norm,
    "aten.mse_loss.default": _pointwise_loss(2),
    "aten.l1_loss.default": _pointwise_loss(2),
    "aten.smooth_l1_loss.default": _pointwise_loss(2),
    "aten.huber_loss.default": _pointwise_loss(2),
    "aten.kl_div.default": _pointwise_loss(2),
    "aten.soft_margin_loss.default": _pointwise_loss(2),
    "aten.hinge_embedding_loss.default": _pointwise_loss(3),
    "aten.poisson_nll_loss.default": _pointwise_loss(5),
    "aten.binary_cross_entropy.default": _pointwise_loss(3),
    "aten.binary_cross_entropy_with_logits.default": _pointwise_loss(4),
    "flash_attn._flash_attn_forward.default": _flash_attention,
    "flash_attn._flash_attn_varlen_forward.default": _flash_attention_packed,
}
