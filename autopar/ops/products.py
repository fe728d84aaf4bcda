"""Products: matrix products, convolutions, einsum.  Their arithmetic intensity is high."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.ops.family import Buffers, OpFamily, RowProduct, Types, argument, aten, nothing_between
from autopar.ops.halos import (
    Halo,
    halo_buffers,
    halo_kernels,
    halo_of,
    per_dim,
    space_names,
    transposed_halo_of,
)
from autopar.ops.work import Work, default_work, floating, sum_bytes
from autopar.program import Op, TensorType, itemsize_bytes

__all__ = ["FAMILIES", "convolution_halos", "convolution_line", "padded_copies", "work_of_convolution"]


# ---------------------------------------------------------------- how they split


def _matmul(op: Op, operand_types: Types, result_types: Types) -> str | None:
    left, right = (
        "k" if len(kind.shape) == 1 else side for kind, side in zip(operand_types, ("* m k", "* k n"), strict=True)
    )
    result = {("k", "k"): "()", ("* m k", "k"): "* m", ("k", "* k n"): "* n"}.get((left, right), "* m n")
    return f"{left}, {right} -> {result} | sum k, plus 0, plus 1"


def _einsum(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """The equation determines the rule, but a letter that repeats within one operand (a diagonal) stays whole."""
    equation = op.args[0]
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").replace("...", "*").partition("->")
    operands = left.split(",")
    if not arrow:  # the implicit result: letters that occur once, in alphabetical order
        right = "*" * ("*" in left) + "".join(sorted(c for c in set(left) - {"*", ","} if left.count(c) == 1))
    whole = {letter for text in operands for letter in text if text.count(letter) > 1}
    summed = sorted(set(left) - set(right) - whole - {",", "*"})
    if "*" in left and "*" not in right:
        return None

    def dims(text: str) -> str:
        return " ".join("_" if letter in whole else letter for letter in text) or "()"

    line = f"#, [{', '.join(map(dims, operands))}] -> {dims(right)}"
    return line + (f" | sum {' '.join(summed)}" if summed else "")


def _convolution(op: Op, operand_types: Types, result_types: Types) -> str:
    names, remarks = space_names(convolution_halos(op, operand_types), "halo_convolution")
    return convolution_line(operand_types, argument(op, 6, "groups", 1), names, remarks)


def convolution_halos(op: Op, operand_types: Types) -> tuple[Halo | None, ...]:
    """The halo of each spatial dim of ``conv1d``, ``conv2d`` or ``conv3d``."""
    x, weight = (kind.shape for kind in operand_types[:2])
    count, padding = len(weight) - 2, argument(op, 4, "padding", 0)
    if len(x) != count + 2:  # no batch dim
        return (None,) * count
    strides, dilations = (per_dim(argument(op, at, key, 1), count, 1) for at, key in ((3, "stride"), (5, "dilation")))
    kernel = weight[2:]
    spans = [dilation * (size - 1) for size, dilation in zip(kernel, dilations, strict=True)]
    if padding == "same":  # for an even kernel, torch pads one row more after than before
        paddings = tuple(span // 2 for span in spans) if not any(span % 2 for span in spans) else ()
    else:
        paddings = per_dim(0 if padding == "valid" else padding, count, 0)
    if not paddings:
        return (None,) * count
    ends = [
        (size + 2 * p - span - 1) // s + 1 for size, p, span, s in zip(x[2:], paddings, spans, strides, strict=True)
    ]
    return tuple(map(halo_of, x[2:], ends, kernel, strides, paddings, dilations))


def _transposed_convolution(op: Op, operand_types: Types, result_types: Types) -> str:
    names, remarks = space_names(_transposed_halos(op, operand_types), "halo_transposed_convolution")
    return _transposed_line(operand_types, argument(op, 6, "groups", 1), names, remarks)


def _transposed_halos(op: Op, operand_types: Types) -> tuple[Halo | None, ...]:
    """The halo of each spatial dim of ``conv_transpose1d``, ``conv_transpose2d`` or ``conv_transpose3d``."""
    x, weight = (kind.shape for kind in operand_types[:2])
    count = len(weight) - 2
    if len(x) != count + 2:  # no batch dim
        return (None,) * count
    strides, paddings, added, dilations = (
        per_dim(argument(op, at, key, default), count, default)
        for at, key, default in ((3, "stride", 1), (4, "padding", 0), (5, "output_padding", 0), (7, "dilation", 1))
    )
    kernel = weight[2:]
    ends = [
        (size - 1) * s - 2 * p + d * (k - 1) + more + 1
        for size, k, s, p, more, d in zip(x[2:], kernel, strides, paddings, added, dilations, strict=True)
    ]
    return tuple(map(transposed_halo_of, x[2:], ends, kernel, strides, paddings, dilations))


def _transposed_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Those of the halo, and the result before the rows beyond the slice are dropped."""
    halo = halo_buffers(_transposed_halos)(op, operands, results, trains, has_kernel)
    return replace(halo, forward=halo.forward + results[0].num_bytes) if has_kernel else halo


def _general_convolution(op: Op, operand_types: Types, result_types: Types) -> str:
    """(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    if op.args[6] is True:
        return _transposed_line(operand_types, op.args[8], ["_"] * (len(operand_types[1].shape) - 2), [])
    return convolution_line(operand_types, op.args[8], ["_"] * (len(operand_types[1].shape) - 2), [])


def convolution_line(operand_types: Types, groups: object, names: list[str], remarks: list[str]) -> str:
    """Batch, space, output channels, and input channels (summed) split.  With groups, channels stay whole.

    `names` are the factors of spatial dims, `remarks` the kernels that some of them need.
    """
    whole, space = " _" * len(names), "".join(f" {name}" for name in names)
    if len(operand_types[0].shape) != len(names) + 2:  # no batch dim
        return f"_{whole}, _ _{whole}, _ -> _{whole}"
    if groups != 1:
        tail = f" | {', '.join(remarks)}" if remarks else ""
        return f"n _{space}, _ _{whole}, _ -> n _{space}{tail}"
    return f"n c{space}, o c{whole}, +o -> n o{space} | {', '.join(['sum c', *remarks])}"


def _transposed_line(operand_types: Types, groups: object, names: list[str], remarks: list[str]) -> str:
    """As a convolution, but the weight's dims are input channels and output channels."""
    whole, space = " _" * len(names), "".join(f" {name}" for name in names)
    if len(operand_types[0].shape) != len(operand_types[1].shape):  # no batch dim
        return f"_{whole}, _ _{whole}, _ -> _{whole}"
    if groups != 1:
        tail = f" | {', '.join(remarks)}" if remarks else ""
        return f"n _{space}, _ _{whole}, _ -> n _{space}{tail}"
    return f"n c{space}, c o{whole}, +o -> n o{space} | {', '.join(['sum c', *remarks])}"


def _grouped_mm(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """(x [rows, k], w [groups, k, n], ends [groups]): the rows of x up to each group's end times its matrix."""
    if [len(kind.shape) for kind in operand_types] != [2, 3, 1]:
        return None
    return "_ k, _ k n, offs: _ -> _ n | sum k"


# ---------------------------------------------------------------- their work


def _product(
    op: Op, operands: Types, results: Types, flops: float, pair: tuple[int, int], extents: tuple[int, ...] = ()
) -> Work:
    """The work of a product of the operands `pair`.  Backward has a product for each operand that needs a gradient.

    Autograd saves an operand exactly if the *other* one needs a gradient, so `Op.saves` tells which do; if it lists
    neither, both are assumed to.
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
        read_bytes=sum_bytes(operands),
        write_bytes=sum_bytes(results[:1]),
        backward_read_bytes=sum_bytes(needed) + num_gradients * sum_bytes(results[:1]),
        backward_write_bytes=sum_bytes(written),
        num_backward_kernels=num_gradients,
        alignment=_alignment((first, second, *results[:1])),
        extents=extents,
        summed_bytes=sum_bytes(results[:1]) if len(floating(operands)) > len(pair) else 0.0,
    )


def _alignment(types: Types) -> int:
    widths = [kind.shape[-1] for kind in types if kind.shape]
    return next((size for size in (64, 8) if all(width % size == 0 for width in widths)), 1)


def _work_of_product(op: Op, operands: Types, results: Types) -> Work:
    """``mm``, ``bmm``, ``matmul``, ``linear``: twice the result's elements times the summed extent."""
    inner = operands[0].shape[-1] if operands[0].shape else 1
    extents = _extents(operands[1], results[0], inner)
    return _product(op, operands, results, 2.0 * results[0].num_elements * inner, (0, 1), extents)


def _extents(second: TensorType, result: TensorType, inner: int) -> tuple[int, ...]:
    """Rows, inner extent and columns, if the second operand is one matrix."""
    if len(second.shape) != 2 or not result.shape:
        return ()
    columns = result.shape[-1]
    return (result.num_elements // max(1, columns), inner, columns)


def _work_of_added_product(op: Op, operands: Types, results: Types) -> Work:
    """``addmm`` and the like: the first operand is added to the product of the next two."""
    inner = operands[1].shape[-1] if operands[1].shape else 1
    extents = _extents(operands[2], results[0], inner)
    return _product(op, operands, results, 2.0 * results[0].num_elements * inner, (1, 2), extents)


def work_of_convolution(op: Op, operands: Types, results: Types) -> Work:
    """Each element of the result is a product with one filter of the weight."""
    return _filtered(op, operands, results, results[0].num_elements)


def _work_of_transposed_convolution(op: Op, operands: Types, results: Types) -> Work:
    """Each element of the input is multiplied with one filter of the weight."""
    return _filtered(op, operands, results, operands[0].num_elements)


def _work_of_general_convolution(op: Op, operands: Types, results: Types) -> Work:
    count = _work_of_transposed_convolution if op.args[6] is True else work_of_convolution
    return count(op, operands, results)


def _filtered(op: Op, operands: Types, results: Types, num_elements: int) -> Work:
    weight = operands[1]
    flops = 2.0 * num_elements * (weight.num_elements / max(1, weight.shape[0]))
    return replace(_product(op, operands, results, flops, (0, 1)), is_convolution=True)


def _work_of_einsum(op: Op, operands: Types, results: Types) -> Work:
    """With two operands every label of the equation is one loop; with an ellipsis it is counted as a product."""
    equation = next((arg for arg in op.args if isinstance(arg, str)), "")
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return _work_of_product(op, operands, results) if len(operands) > 1 else default_work(op, operands, results)
    terms = equation.replace(" ", "").split("->")[0].split(",")
    extents = {
        label: size
        for term, operand in zip(terms, operands, strict=True)
        for label, size in zip(term, operand.shape, strict=True)
    }
    return _product(op, operands, results, 2.0 * math.prod(extents.values()), (0, 1))


_PADDED_FROM = 64.0  # multiplications for each element read or written; inductor's limits are 78 (A100) and more


def padded_copies(product: RowProduct, operands: Types, result: TensorType) -> Buffers:
    """Bytes of copies that inductor may make on a GPU of tensors whose rows are no whole number of 16 bytes.

    It copies them with zeros added where the padded product is faster, which it measures while it compiles
    (torch/_inductor/fx_passes/pad_mm.py, torch 2.13).  A result that was padded is copied for its readers: as an output
    and for backward, logits of 50257 entries were in memory three times (a model on an H100, torch 2.11).

    Args:
        product: which of the operands are rows and matrix.
        operands: their local types.
        result: the local type of the result.
    """
    rows, matrix = operands[product.rows], operands[product.matrix]
    unit = 16 // itemsize_bytes(result.dtype)
    k = rows.shape[-1]
    n = result.shape[-1]
    m = result.num_elements // max(1, n)
    if unit not in (4, 8) or not m * n * k or m * n * k < _PADDED_FROM * (m * k + n * k + m * n):
        return Buffers()

    def copied(tensor: TensorType, *sizes: int) -> float:
        return tensor.num_bytes if any(size % unit for size in sizes) else 0.0

    of_rows, of_matrix, of_result = copied(rows, m, k), copied(matrix, k, n), copied(result, m, n)
    return Buffers(forward=of_rows + of_matrix + 2.0 * of_result, backward=of_result + max(of_rows, of_matrix))


FAMILIES = (
    OpFamily(
        aten({"linear": "* h, f h, +f -> * f | sum h, plus 0"}),
        is_cheap=False,
        count_work=_work_of_product,
        row_products={"aten.linear.default": RowProduct(0, 1, 2, transposed=True)},
        buffers=nothing_between,
    ),
    OpFamily(
        aten(
            {
                "mm": "m k, k n -> m n | sum k, plus 0, plus 1",
                "bmm": "b m k, b k n -> b m n | sum k, plus 0, plus 1",
                "mv": "m k, k -> m | sum k",
                "dot": "k, k -> () | sum k",
                "matmul": _matmul,
                "_grouped_mm": _grouped_mm,
            }
        ),
        is_cheap=False,
        count_work=_work_of_product,
        row_products={
            "aten.mm.default": RowProduct(0, 1),
            "aten.matmul.default": RowProduct(0, 1),
        },
    ),
    OpFamily(
        aten(
            {
                "addmm": "+m n, m k, k n -> m n | sum k",
                "baddbmm": "+b m n, b m k, b k n -> b m n | sum k",
                "addmv": "+m, m k, k -> m | sum k",
                "addbmm": None,
            }
        ),
        is_cheap=False,
        count_work=_work_of_added_product,
        row_products={"aten.addmm.default": RowProduct(1, 2, 0)},
    ),
    OpFamily(aten({"einsum": _einsum}), is_cheap=False, count_work=_work_of_einsum),
    OpFamily(
        aten({"conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding": _convolution}),
        is_cheap=False,
        count_work=work_of_convolution,
        kernels=halo_kernels("halo_convolution", convolution_halos),
        buffers=halo_buffers(convolution_halos),
    ),
    OpFamily(
        aten({"conv_transpose1d conv_transpose2d.input conv_transpose3d.input": _transposed_convolution}),
        is_cheap=False,
        count_work=_work_of_transposed_convolution,
        kernels=halo_kernels("halo_transposed_convolution", _transposed_halos),
        buffers=_transposed_buffers,
    ),
    OpFamily(aten({"convolution": _general_convolution}), is_cheap=False, count_work=_work_of_general_convolution),
    OpFamily(
        aten(
            {
                "_convolution convolution_overrideable conv_tbc conv_depthwise3d _conv_depthwise2d thnn_conv2d": None,
                "slow_conv3d slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d": None,
                "linalg_matmul linalg_multi_dot chain_matmul _int_mm _scaled_mm _scaled_grouped_mm": None,
                "_sparse_mm _sparse_addmm lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _cudnn_rnn": None,
                "_addmm_activation _thnn_fused_lstm_cell _thnn_fused_gru_cell": None,
            }
        ),
        is_cheap=False,
    ),
    # These are counted by their bytes.
    OpFamily({"transformers.grouped_mm_fallback.default": _grouped_mm}, is_cheap=False),
    OpFamily(aten({"bilinear": "* _, * _, f _ _, f -> * f"}), is_cheap=False),
    OpFamily(
        aten(
            {
                "vdot": "k, k -> () | sum k",
                "outer ger": "m, n -> m n",
                "linalg_vecdot": "*, *, @-1 -> *-@ | sum @",
                "cdist": "* m _, * n _ -> * m n",
                "linalg_inv inverse linalg_cholesky linalg_matrix_exp matrix_exp": "* _ _ -> * _ _",
                "linalg_det det logdet": "* _ _ -> *",
                "linalg_solve_triangular": "* _ _, * _ _ -> * _ _ | plus 1",
                "cosine_similarity": "*, *, @1 -> *-@",
            }
        )
    ),
)
