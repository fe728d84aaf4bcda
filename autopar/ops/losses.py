"""Losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autopar.ops.family import Buffers, Kernel, OpFamily, Rule, Saves, Types, argument, aten
from autopar.ops.views import dim_names, text_of, without
from autopar.ops.work import Work, sum_bytes
from autopar.program import KernelCollective, Op, TensorType, itemsize_bytes

__all__ = ["FAMILIES", "loss_collectives"]


def _class_dim(op: Op) -> int:
    """cross_entropy(logits, target, weight, class_dim, ignore_index, label_smoothing, reduction)."""
    dim = argument(op, 3, "class_dim", 1)
    return dim if isinstance(dim, int) else 1


def _cross_entropy(op: Op, operand_types: Types, result_types: Types) -> str | None:
    rank = len(operand_types[0].shape)
    if len(operand_types[1].shape) != rank - 1:
        return None
    class_dim = _class_dim(op) % rank
    names = dim_names(rank)
    names[class_dim] = "v"
    positions = without(names, class_dim)
    target = text_of(positions)
    remarks = "by v vocab_parallel_cross_entropy"
    is_sum = argument(op, 6, "reduction", "sum") == "sum"
    if is_sum and positions:
        remarks = f"sum {' '.join(positions)}, {remarks}"
    return f"{text_of(names)}, target: {target}, weight: _ -> {'()' if is_sum else target} | {remarks}"


def _collectives(op: Op, operand_types: Types) -> tuple[KernelCollective, ...]:
    """For each position the largest logit; then the sum of exponentials and the target's logit (and with label
    smoothing the sum of the logits).
    """
    logits = operand_types[0]
    label_smoothing = argument(op, 5, "label_smoothing", 0.0)
    return loss_collectives(logits, _class_dim(op) % len(logits.shape), label_smoothing)


def loss_collectives(logits: TensorType, class_dim: int, label_smoothing: object) -> tuple[KernelCollective, ...]:
    """The collectives of a cross entropy whose classes are split."""
    dims = (class_dim,)
    dtype = "float64" if logits.dtype == "float64" else "float32"
    return (
        KernelCollective("all_reduce", "forward", 0, dims, dtype),
        KernelCollective("all_reduce", "forward", 0, dims, dtype, count=3 if label_smoothing else 2),
    )


def _work(op: Op, operands: Types, results: Types) -> Work:
    """Log-probabilities in float32 are written, read again for the terms, and saved for backward."""
    logits = operands[0].num_bytes
    log_probabilities = 4.0 * operands[0].num_elements
    rest = sum_bytes(operands[1:])
    return Work(
        "bytes",
        operands[0].dtype,
        read_bytes=logits + rest,
        write_bytes=log_probabilities + sum_bytes(results),
        backward_read_bytes=log_probabilities + rest,
        backward_write_bytes=log_probabilities + logits,
        num_backward_kernels=2,
    )


def _saves(op: Op, operands: Types, results: Types) -> Saves:
    # Autograd saves the log-softmax, which has the size and memory format of the logits, and is counted as these.
    return tuple(range(len(operands))), 0


def _buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    logits = operands[0]
    if not has_kernel:  # torch saves the log-softmax, which is as large as the logits, in place of the logits
        is_last = _class_dim(op) % len(logits.shape) == len(logits.shape) - 1
        copied = 0.0 if is_last else float(logits.num_bytes)  # the kernel of torch has classes last
        return Buffers(forward=copied, backward=logits.num_bytes, kept=logits.num_bytes)
    # The kernel works on a copy with at least four bytes per element, and computes its gradient in that dtype.
    wide = max(logits.num_bytes, 4 * logits.num_elements)
    return Buffers(forward=wide, backward=wide if wide > logits.num_bytes else 0)


def _ctc(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """ctc_loss(log_probs [T, N, C], targets, input_lengths, target_lengths, blank, zero_infinity) -> [N]."""
    is_padded = len(operand_types[1].shape) == 2  # otherwise the targets of all rows are concatenated
    return "_ b _, b _, b, b -> b" if is_padded else "..., ..., ..., ... -> ..."


def _ctc_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Probabilities [rows, frames, 2 * targets + 1] of being at a label, or a blank around it, by a frame.

    Backward makes them again, and those from the end.
    """
    log_probabilities, targets = operands[:2]
    frames, rows, _ = log_probabilities.shape
    length = targets.shape[1] if len(targets.shape) == 2 else -(-targets.num_elements // max(1, rows))
    whole = float(rows * frames * (2 * length + 1) * itemsize_bytes(log_probabilities.dtype))
    return Buffers(forward=whole, backward=2 * whole)


def _elementwise(reduction_at: int) -> Rule:
    """The rule of an elementwise loss with reduction 0 (none), 1 (mean, which doesn't split) or 2 (sum)."""

    def rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
        reduction = argument(op, reduction_at, "reduction", 1)
        operands = ", ".join(["*" if reduction in (0, 2) else "..."] * reduction_at)
        if reduction == 0:
            return f"{operands} -> *"
        # With broadcasting, the operand that determines a summed dim's size may not have that dim.
        if reduction == 2:
            return f"{operands} -> () | sum *" if len({kind.shape for kind in operand_types}) == 1 else None
        return f"{operands} -> ()"

    return rule


def _reduced_buffers(
    op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool, *, backward: int = 0
) -> Buffers:
    """The losses of all elements are written, and then added up; `backward`: tensors of their size that it makes."""
    whole = float(max(operand.num_bytes for operand in operands))
    return Buffers(forward=0.0 if results[0].shape else whole, backward=backward * whole)


def _entropy_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """binary_cross_entropy(x, target, weight): the gradient of a target is made of two logarithms."""
    return _reduced_buffers(op, operands, results, trains, has_kernel, backward=int(trains[1]))


def _logits_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """binary_cross_entropy_with_logits(x, target, weight, pos_weight): its log-sigmoids, their weights and the losses
    are there at once; backward the sigmoids (at::native, Loss.cpp, the same on all devices).
    """
    is_weighted = argument(op, 3, "pos_weight") is not None
    losses = _reduced_buffers(op, operands, results, trains, has_kernel)
    whole = float(operands[0].num_bytes)
    return Buffers(
        forward=losses.forward + (2 if is_weighted else 1) * whole, backward=(3 if is_weighted else 1) * whole
    )


FAMILIES = (
    OpFamily(
        {"autopar.cross_entropy": _cross_entropy},
        function="cross_entropy",
        kernels={"vocab_parallel_cross_entropy": Kernel(_collectives, cuts_vocabulary=True)},
        count_work=_work,
        saves=_saves,
        buffers=_buffers,
        num_choices=lambda op, shape: shape[_class_dim(op)],
        row_dim=_class_dim,
        fuses=True,
    ),
    OpFamily(aten({"cross_entropy_loss": None}), count_work=_work),
    OpFamily(
        {"autopar.cross_entropy_denominator": "*, weight: _ -> () | sum *"},
        function="cross_entropy_denominator",
        saves=lambda op, operands, results: ((), 0),
        num_differentiable=0,
        num_choices=lambda op, shape: 2,
        fuses=True,
    ),
    OpFamily(
        {"autopar_traced.ctc_loss.default": _ctc},
        saves=lambda op, operands, results: ((0, 1, 2, 3), 0),
        buffers=_ctc_buffers,
        is_cheap=False,
    ),
    OpFamily(  # what runs as other ops is counted by trace
        aten(
            {
                "l1_loss kl_div": _elementwise(2),
                "hinge_embedding_loss": _elementwise(3),
                "poisson_nll_loss": _elementwise(5),
            }
        ),
        fuses=True,
        takes_expanded=True,
    ),
    OpFamily(
        aten({"mse_loss smooth_l1_loss huber_loss": _elementwise(2)}),
        buffers=_reduced_buffers,
        fuses=True,
        takes_expanded=True,
    ),
    OpFamily(
        aten({"binary_cross_entropy": _elementwise(3)}), buffers=_entropy_buffers, fuses=True, takes_expanded=True
    ),
    OpFamily(
        aten({"soft_margin_loss": _elementwise(2)}),
        buffers=partial(_reduced_buffers, backward=2),
        fuses=True,
        takes_expanded=True,
    ),
    OpFamily(
        aten({"binary_cross_entropy_with_logits": _elementwise(4)}),
        buffers=_logits_buffers,
        fuses=True,
        takes_expanded=True,
    ),
)
