"""The work of an op on local tensors: floating-point operations and bytes, separately for forward and backward.

It is counted without regard to a device.  Ops without `count_work` in their record get `default_work`: in eager
execution they read each operand and write each result.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.program import Op, TensorType

__all__ = ["Work", "default_work", "dtype_of", "floating", "sum_bytes"]

Types = tuple[TensorType, ...]


@dataclass(frozen=True)
class Work:
    """The work of one op on one device.

    Args:
        kind: ``"matmul"``, ``"attention"``, ``"bytes"`` or ``"view"`` (no work forward).
        dtype: the dtype of the computation.
        flops: multiplications and additions of the forward; causal attention counts half of the square.
        backward_flops: of the backward, if every operand that could need a gradient needs one.
        read_bytes: read in forward.
        write_bytes: written in forward.
        backward_read_bytes: read in backward: result gradients and saved tensors.
        backward_write_bytes: written in backward: operand gradients.
        num_backward_kernels: the number of kernels of the backward.
        length: attention: the number of keys of each query; else 0.
        head_dim: attention: the head size; else 0.
        is_causal: attention: whether later keys are skipped.
        is_plain: attention: whether a CPU runs it as plain products, which save the scores.
        is_new_kernel: attention: whether a kernel written for the newest devices runs.
        alignment: matmul: the largest of 64, 8 and 1 elements that divides every row of operands and result.
        extents: matmul: rows, inner extent and columns of a product of two matrices; () for a batch of products or a
            convolution.  attention: the numbers of queries and keys.
        summed_bytes: matmul: bytes of result gradients that backward sums for a bias.
        is_convolution: matmul: whether it is a convolution.
        is_passed_on: whether backward passes on the result's gradient itself, or a sum of it.
        is_with_number: whether an operand is a number instead of a tensor.
        width: elements of a row of the first operand; for a product, of the result; for a cross entropy, the classes.
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
    is_convolution: bool = False
    is_passed_on: bool = False
    is_with_number: bool = False
    width: int = 1

    @property
    def is_counted_in_flops(self) -> bool:
        """Whether measured seconds are a function of floating-point operations instead of bytes."""
        return self.kind in ("matmul", "attention")

    @property
    def num_bytes(self) -> float:
        """Bytes read and written in forward."""
        return self.read_bytes + self.write_bytes

    @property
    def backward_num_bytes(self) -> float:
        """Bytes read and written in backward."""
        return self.backward_read_bytes + self.backward_write_bytes


def default_work(op: Op, operands: Types, results: Types) -> Work:
    """The work of a view is nothing; any other op is one kernel that reads all operands and writes all results.

    Its backward reads gradients and saved tensors, and writes gradients.
    """
    if op.is_view:
        return _work_of_view(operands, results)
    return Work(
        "bytes",
        dtype_of(operands, results),
        read_bytes=sum_bytes(operands),
        write_bytes=sum_bytes(results),
        backward_read_bytes=sum_bytes(floating(results)) + sum_bytes(_saved(op, operands, results)),
        backward_write_bytes=sum_bytes(floating(operands)),
    )


def _work_of_view(operands: Types, results: Types) -> Work:
    """Nothing in forward.  The gradient of a view is a view, unless elements were dropped, repeated or split up."""
    resizes = operands and results and operands[0].num_elements != sum(t.num_elements for t in results)
    if not resizes and len(results) < 2:  # the gradients of several parts are concatenated
        return Work("view", dtype_of(operands, results), num_backward_kernels=0)
    return Work(
        "view",
        dtype_of(operands, results),
        backward_read_bytes=sum_bytes(floating(results)),
        backward_write_bytes=sum_bytes(floating(operands[:1])),
    )


def sum_bytes(types: Types) -> float:
    """The bytes of all tensors of these types."""
    return sum((t.num_bytes for t in types), 0.0)


def floating(types: Types) -> Types:
    """The types that can carry a gradient."""
    return tuple(t for t in types if t.is_floating)


def dtype_of(operands: Types, results: Types) -> str:
    """The dtype in which an op with these operands and results computes."""
    return (floating(operands) or floating(results) or operands or results)[0].dtype


def _saved(op: Op, operands: Types, results: Types) -> Types:
    everything = operands + results
    return tuple(everything[index] for index in op.saves if index < len(everything))
