"""What an op has to do on local tensors: floating-point operations and bytes, forward and backward apart.

Pure counting; knows no device.  `count_work` is the entry; `WORK` maps an op's name to the function that
counts it, and
everything else is counted by its bytes: eager execution reads each operand and writes each result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.program import Arg, Op, TensorType

__all__ = ["Work", "count_work", "packet_name"]

Types = tuple[TensorType, ...]


@dataclass(frozen=True)
class Work:
    """The work of one op on one device.

    Args:
        kind: ``"matmul"``, ``"attention"``, ``"bytes"`` or ``"view"`` (no work forward).
        dtype: what it computes in.
        flops: multiplications and additions of the forward; causal attention counts half of the square.
        backward_flops: of the backward, when every operand that could need a gradient needs one.
        read_bytes: forward reads.
        write_bytes: forward writes.
        backward_read_bytes: backward reads: result gradients and saved tensors.
        backward_write_bytes: backward writes: operand gradients.
        num_backward_kernels: how many kernels the backward starts.
        length: attention: how many keys each query meets; else 0.
        head_dim: attention: size of a head; else 0.
        is_causal: attention: whether later keys are skipped.
        is_plain: attention: whether a CPU runs it as plain products, which keep the scores.
        is_new_kernel: attention: by a kernel written for the newest devices.
        alignment: matmul: the largest of 64, 8 and 1 elements that every row of operands and result is a multiple of.
        extents: matmul: rows, inner extent and columns of a product of two matrices; () for a batch of products or a
            convolution.  attention: queries, and keys.
        summed_bytes: matmul: of result gradients that backward sums up for a bias.
        is_passed_on: whether backward hands the result's gradient on as it is, or summed up.
        is_with_number: whether an operand is a number instead of a tensor.
        width: elements of a row of the first operand; of a product, of the result; of a cross entropy, classes.
    """

    kind: str
    dtype: str
    flops: float = 0.0
    backward_flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    backward_read_bytes: float = 0.0
    backward_write_bytes: float = 0.0
    num_backward_kernels: int = 1
    length: int = 0
    head_dim: int = 0
    is_causal: bool = False
    is_plain: bool = False
    is_new_kernel: bool = False
    alignment: int = 64
    extents: tuple[int, ...] = ()
    summed_bytes: float = 0.0
    is_passed_on: bool = False
    is_with_number: bool = False
    width: int = 1

    @property
    def is_counted_in_flops(self) -> bool:
        """Whether seconds are measured over floating-point operations, not bytes."""
        return self.kind in ("matmul", "attention")

    @property
    def num_bytes(self) -> float:
        """Forward bytes, read and written."""
        return self.read_bytes + self.write_bytes

    @property
    def backward_num_bytes(self) -> float:
        """Backward bytes, read and written."""
        return self.backward_read_bytes + self.backward_write_bytes


def count_work(op: Op, operands: Types, results: Types) -> Work:
    """The work of `op` on operands and results of these local types."""
    count = WORK.get(packet_name(op.target), _count_view if op.is_view else _count_bytes)
    work = count(op, operands, results)
    if work.is_counted_in_flops:
        return replace(work, width=results[0].shape[-1] if results[0].shape else 1)
    width = operands[0].shape[-1] if operands and operands[0].shape else 1
    if packet_name(op.target) == "autopar.cross_entropy":
        class_dim = _argument(op, 3, "class_dim", 1)
        width = operands[0].shape[class_dim if isinstance(class_dim, int) else 1]
    return replace(work, width=width, is_with_number=len(operands) == 1 and _has_number(op))


def _has_number(op: Op) -> bool:
    """Of two arguments, of which one is a tensor: whether the other one is a number."""
    return len(op.args) == 2 and any(isinstance(arg, int | float) for arg in op.args)


def packet_name(target: str) -> str:
    """An op's name without its overload: ``aten.add`` for ``aten.add.Tensor``."""
    return target.rsplit(".", 1)[0] if target.count(".") > 1 else target


def _sum_bytes(types: Types) -> float:
    return sum((t.num_bytes for t in types), 0.0)


def _floating(types: Types) -> Types:
    return tuple(t for t in types if t.is_floating)


def _saved(op: Op, operands: Types, results: Types) -> Types:
    everything = operands + results
    return tuple(everything[index] for index in op.saves if index < len(everything))


def _dtype(operands: Types, results: Types) -> str:
    return (_floating(operands) or _floating(results) or operands or results)[0].dtype


def _count_bytes(op: Op, operands: Types, results: Types) -> Work:
    """One kernel that reads all and writes all; backward reads gradients and saved tensors, writes
    gradients."""
    return Work(
        "bytes",
        _dtype(operands, results),
        read_bytes=_sum_bytes(operands),
        write_bytes=_sum_bytes(results),
        backward_read_bytes=_sum_bytes(_floating(results)) + _sum_bytes(_saved(op, operands, results)),
        backward_write_bytes=_sum_bytes(_floating(operands)),
    )


def _count_view(op: Op, operands: Types, results: Types) -> Work:
    """Nothing forward.  The gradient of a view is a view, unless elements were dropped, repeated or parted."""
    resizes = operands and results and operands[0].num_elements != _sum_elements(results)
    if not resizes and len(results) < 2:  # the gradients of several parts are joined
        return Work("view", _dtype(operands, results), num_backward_kernels=0)
    gradients = _sum_bytes(_floating(results))
    return Work(
        "view",
        _dtype(operands, results),
        backward_read_bytes=gradients,
        backward_write_bytes=_sum_bytes(_floating(operands[:1])),
    )


def _sum_elements(types: Types) -> int:
    return sum(t.num_elements for t in types)


def _count_add(op: Op, operands: Types, results: Types) -> Work:
    """A gradient passes unchanged to an operand of the same shape; to a broadcast one it is summed."""
    broadcast = tuple(t for t in _floating(operands) if t.num_elements < results[0].num_elements)
    return Work(
        "bytes",
        _dtype(operands, results),
        read_bytes=_sum_bytes(operands),
        write_bytes=_sum_bytes(results),
        backward_read_bytes=_sum_bytes(results) * len(broadcast),
        backward_write_bytes=_sum_bytes(broadcast),
        num_backward_kernels=len(broadcast),
        is_passed_on=True,
    )


def _count_factory(op: Op, operands: Types, results: Types) -> Work:
    return Work("bytes", _dtype(operands, results), write_bytes=_sum_bytes(results), num_backward_kernels=0)


def _count_lookup(op: Op, operands: Types, results: Types) -> Work:
    """Reads the rows that it writes; backward fills the whole table with zeros and adds rows into it."""
    rows = _sum_bytes(results)
    return Work(
        "bytes",
        _dtype(operands, results),
        read_bytes=rows + _sum_bytes(operands[1:]),
        write_bytes=rows,
        backward_read_bytes=2 * rows + _sum_bytes(operands[1:]),
        backward_write_bytes=rows + _sum_bytes(operands[:1]),
        num_backward_kernels=2,
    )


def _count_cross_entropy(op: Op, operands: Types, results: Types) -> Work:
    """Log-probabilities in float32 are written, read again for the terms, and kept for the backward."""
    logits = operands[0].num_bytes
    log_probabilities = 4.0 * operands[0].num_elements
    rest = _sum_bytes(operands[1:])
    return Work(
        "bytes",
        operands[0].dtype,
        read_bytes=logits + rest,
        write_bytes=log_probabilities + _sum_bytes(results),
        backward_read_bytes=log_probabilities + rest,
        backward_write_bytes=log_probabilities + logits,
        num_backward_kernels=2,
    )


def _count_batch_norm(op: Op, operands: Types, results: Types) -> Work:
    """Statistics first, then the values: every large tensor is read twice, forward and backward."""
    whole, rest = operands[0].num_bytes, _sum_bytes(operands[1:])
    return Work(
        "bytes",
        operands[0].dtype,
        read_bytes=2 * whole + rest,
        write_bytes=_sum_bytes(results),
        backward_read_bytes=4 * whole + rest,
        backward_write_bytes=whole + rest,
        num_backward_kernels=2,
    )


def _count_dropout(op: Op, operands: Types, results: Types) -> Work:
    mask, whole = 1.0 * operands[0].num_elements, operands[0].num_bytes
    return Work(
        "bytes",
        operands[0].dtype,
        read_bytes=whole,
        write_bytes=whole + mask,
        backward_read_bytes=whole + mask,
        backward_write_bytes=whole,
    )


def _matmul(
    op: Op, operands: Types, results: Types, flops: float, pair: tuple[int, int], extents: tuple[int, ...] = ()
) -> Work:
    """A product of operands `pair`.  Backward multiplies once for each operand that needs a gradient.

    Autograd saves an operand exactly if the *other* one needs a gradient, so `Op.saves` tells how many do;
    without
    any, both are assumed.
    """
    saved = [index for index in pair if index in op.saves]
    num_gradients = len(saved) or 2
    first, second = operands[pair[0]], operands[pair[1]]
    # The gradient of each operand is a product of the result's gradient and the other operand.
    needed = tuple(operands[i] for i in saved) or (first, second)
    written = tuple(operands[pair[1 - pair.index(i)]] for i in saved) or (first, second)
    return Work(
        "matmul",
        first.dtype,
        flops=flops,
        backward_flops=flops * num_gradients,
        read_bytes=_sum_bytes(operands),
        write_bytes=_sum_bytes(results[:1]),
        backward_read_bytes=_sum_bytes(needed) + num_gradients * _sum_bytes(results[:1]),
        backward_write_bytes=_sum_bytes(written),
        num_backward_kernels=num_gradients,
        alignment=_alignment((first, second, *results[:1])),
        extents=extents,
        summed_bytes=_sum_bytes(results[:1]) if len(_floating(operands)) > len(pair) else 0.0,
    )


def _alignment(types: Types) -> int:
    rows = [t.shape[-1] for t in types if t.shape]
    return next((size for size in (64, 8) if all(row % size == 0 for row in rows)), 1)


def _count_matmul(op: Op, operands: Types, results: Types) -> Work:
    """``mm``, ``bmm``, ``matmul``, ``linear``: twice the result's elements times the summed extent."""
    inner = operands[0].shape[-1] if operands[0].shape else 1
    extents = _extents(operands[1], results[0], inner)
    return _matmul(op, operands, results, 2.0 * _sum_elements(results[:1]) * inner, (0, 1), extents)


def _extents(second: TensorType, result: TensorType, inner: int) -> tuple[int, ...]:
    """Rows, inner extent and columns, if the second operand is one matrix."""
    if len(second.shape) != 2 or not result.shape:
        return ()
    columns = result.shape[-1]
    return (result.num_elements // max(1, columns), inner, columns)


def _count_added_matmul(op: Op, operands: Types, results: Types) -> Work:
    """``addmm`` and its like: the first operand is added to the product of the next two."""
    inner = operands[1].shape[-1] if operands[1].shape else 1
    extents = _extents(operands[2], results[0], inner)
    return _matmul(op, operands, results, 2.0 * _sum_elements(results[:1]) * inner, (1, 2), extents)


def _count_convolution(op: Op, operands: Types, results: Types) -> Work:
    """Each element of the result (of the input, when transposed) meets one filter of the weight."""
    is_transposed = "transpose" in op.target or (len(op.args) > 6 and op.args[6] is True)
    weight = operands[1]
    elements = operands[0].num_elements if is_transposed else results[0].num_elements
    per_element = weight.num_elements / max(1, weight.shape[0])
    return _matmul(op, operands, results, 2.0 * elements * per_element, (0, 1))


def _count_einsum(op: Op, operands: Types, results: Types) -> Work:
    """Two operands: every label of the equation is one loop.  An ellipsis is counted as the result's size."""
    equation = next((arg for arg in op.args if isinstance(arg, str)), "")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return _count_matmul(op, operands, results) if len(operands) > 1 else _count_bytes(op, operands, results)
    terms = equation.replace(" ", "").split("->")[0].split(",")
    extents = {
        label: size
        for term, operand in zip(terms, operands, strict=True)
        for label, size in zip(term, operand.shape, strict=True)
    }
    return _matmul(op, operands, results, 2.0 * math.prod(extents.values()), (0, 1))


def _argument(op: Op, position: int, name: str, default: Arg) -> Arg:
    found = dict(op.kwargs).get(name)
    if found is not None:
        return found
    return op.args[position] if position < len(op.args) else default


def _count_attention(op: Op, operands: Types, results: Types) -> Work:
    """Two products of [queries, keys] by the head size; causal skips half; backward does five for two."""
    query, key, value = operands[:3]
    sequence = -3 if "flash_attn" in op.target else -2
    heads_and_batch = query.num_elements / (query.shape[sequence] * query.shape[-1])
    length = key.shape[sequence]
    is_causal = _argument(op, 5, "is_causal", False) is True or _argument(op, 5, "causal", False) is True
    flops = 2.0 * heads_and_batch * query.shape[sequence] * length * (query.shape[-1] + value.shape[-1])
    flops *= 0.5 if is_causal else 1.0
    read = _sum_bytes(operands)
    return Work(
        "attention",
        query.dtype,
        flops=flops,
        backward_flops=2.5 * flops,
        read_bytes=read,
        write_bytes=_sum_bytes(results[:1]),
        backward_read_bytes=read + 2 * _sum_bytes(results[:1]),
        backward_write_bytes=_sum_bytes(operands[:3]),
        num_backward_kernels=2,
        length=length,
        head_dim=query.shape[-1],
        is_causal=is_causal,
        extents=(query.shape[sequence], length),
        is_plain=bool(op.plain_saves or op.plain_saved_extra_bytes),
        is_new_kernel="cudnn" in op.target or "flash_attn_3" in op.target,
    )


def _named(count: Callable[[Op, Types, Types], Work], names: str) -> dict[str, Callable[[Op, Types, Types], Work]]:
    return {name if "." in name else f"aten.{name}": count for name in names.split()}


WORK: dict[str, Callable[[Op, Types, Types], Work]] = {
    **_named(_count_matmul, "linear mm bmm matmul dot mv _grouped_mm"),
    **_named(_count_added_matmul, "addmm baddbmm addbmm addmv"),
    **_named(_count_einsum, "einsum"),
    **_named(
        _count_convolution,
        "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    **_named(
        _count_attention,
        "scaled_dot_product_attention _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu "
        "flash_attn._flash_attn_forward flash_attn_3._flash_attn_forward",
    ),
    **_named(_count_add, "add sub rsub"),
    **_named(
        _count_factory,
        "arange zeros ones full empty zeros_like ones_like full_like empty_like new_zeros scalar_tensor",
    ),
    **_named(_count_lookup, "embedding index_select gather index"),
    **_named(_count_cross_entropy, "autopar.cross_entropy cross_entropy_loss"),
    **_named(_count_batch_norm, "autopar.batch_norm batch_norm native_batch_norm group_norm native_group_norm"),
    **_named(_count_dropout, "autopar.dropout dropout native_dropout"),
}
