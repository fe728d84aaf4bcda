"""Ops that combine the elements of a dim: slices of sums are terms; for other ops the dim stays whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.ops.family import Buffers, Kernel, OpFamily, Rule, Types, argument, aten
from autopar.program import KernelCollective, Op

__all__ = ["FAMILIES"]

_TABLE = {
    # The dims of a mean stay whole: trace rewrites means as a sum, which splits, and a division by the global count.
    "mean.dim": "*, @ -> *-@ | plus 0",
    "mean": "... -> () | plus 0",
    "argmax argmin any.dim any.dims all.dim all.dims": "*, @ -> *-@",
    "max.dim min.dim median.dim nanmedian.dim": "*, @ -> *-@, *-@",
    "max min all any": "... -> ()",
    "count_nonzero": "... -> ()",
    "softmax.int log_softmax.int _safe_softmax _softmax _log_softmax special_softmax": "*, @ -> *",
    "glu": "*, @-1 -> *",
}


def _histogram(op: Op, operand_types: Types, result_types: Types) -> str:
    """histc(x, bins, min, max): counts of slices are terms of a sum if the bins don't depend on x."""
    low, high = argument(op, 2, "min", 0), argument(op, 3, "max", 0)
    return "* -> _ | sum *" if low != high else "... -> _"


_SCANS: Mapping[str, Rule] = {
    "mode": "*, @-1 -> *-@, *-@",
    "kthvalue": "*, #, @-1 -> *-@, *-@",
    "cummax cummin": "*, @ -> *, *",
    "topk": "*, #, @-1 -> *, *",
    "sort sort.stable": "*, @-1 -> *, *",
    "argsort argsort.stable": "*, @-1 -> *",
    "diff": "*, #, @-1, *, * -> *",
    "histc": _histogram,
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft": "*, #, @-1 -> *",
}


def _running(kernel: str, remark: str = "") -> Rule:
    """cumsum(x, dim) and its like: the dim splits by a kernel that passes on the totals of slices."""

    def rule(op: Op, operand_types: Types, result_types: Types) -> str:
        x, dim = operand_types[0], argument(op, 1, "dim")
        if not x.shape or not isinstance(dim, int) or not x.is_floating or x.dtype != result_types[0].dtype:
            return f"*, @ -> * | {remark}" if remark else "*, @ -> *"
        names = [f"d{each}" for each in range(len(x.shape))]
        dims = " ".join(names)
        return f"{dims}, # -> {dims} | " + ", ".join(filter(None, [remark, f"by {names[dim]} {kernel}"]))

    return rule


def _passed_totals(op: Op, operands: Types, *, back: int) -> tuple[KernelCollective, ...]:
    """The total of a slice goes round a ring; in backward so do `back` tensors like it."""
    x, dim = operands[0], argument(op, 1, "dim")
    assert isinstance(dim, int)
    forward = KernelCollective("send", "forward", 0, (dim % len(x.shape),), x.dtype, is_ring=True)
    return forward, replace(forward, phase="backward", count=back, is_of_gradient=True)


def _running_family(target: str, kernel: str, back: int, count: int, remark: str = "") -> OpFamily:
    """`count` as in `_formula_buffers`: a cumsum's backward is ``grad.flip(dim).cumsum(dim).flip(dim)``."""
    kernels = {kernel: Kernel(partial(_passed_totals, back=back), is_on_one_axis=True)}
    buffers = partial(_running_buffers, count=count)
    return OpFamily(aten({target: _running(kernel, remark)}), kernels=kernels, buffers=buffers)


def _distance(op: Op, operand_types: Types, result_types: Types) -> str:
    """pairwise_distance(x, y, p, eps, keepdim): over the last dim."""
    return "* _, * _ -> * _" if argument(op, 4, "keepdim", False) else "* _, * _ -> *"


def _formula_buffers(
    op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool, *, count: int
) -> Buffers:
    """The backward computes in the operand's size, as ``grad * (x - result).exp()`` of a logsumexp does, with so many
    tensors in between (tests/ops/test_backward_buffers.py counts them).
    """
    return Buffers(backward=float(count * operands[0].num_bytes))


def _product_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Where elements are zero, which a mask says, the backward runs products from both ends of the dim."""
    return Buffers(backward=float(5 * operands[0].num_bytes + operands[0].num_elements))


def _running_buffers(
    op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool, *, count: int
) -> Buffers:
    """With another dtype the operand is cast first, and the gradient last."""
    is_cast = operands[0].dtype != results[0].dtype
    cast = float(results[0].num_bytes) if is_cast else 0.0
    return Buffers(forward=cast, backward=count * float(max(operands[0].num_bytes, results[0].num_bytes)) + cast)


def _log_sum_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """``log((x - max).exp().sum()) + max``, and backward ``grad * (x - result).exp()``."""
    return Buffers(forward=float(operands[0].num_bytes), backward=2.0 * operands[0].num_bytes)


def _extreme_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """The gradient is that of all elements equal to the result, by a mask, divided by how many there are."""
    return Buffers(backward=float(operands[0].num_bytes + operands[0].num_elements))


FAMILIES = (
    OpFamily(
        aten({"sum": "* -> () | sum *, plus 0", "sum.dim_IntList": "*, @ -> *-@ | sum @, plus 0"}),
        gradient="expanded",
        fuses=True,
    ),
    OpFamily(aten(_TABLE), fuses=True),
    OpFamily(aten(_SCANS)),
    _running_family("cumsum", "running_sum", 1, 2, "plus 0"),
    _running_family("cumprod", "running_product", 2, 8),  # where it finds zeros; 4 without
    _running_family("logcumsumexp", "running_log_sum", 2, 7),
    OpFamily(
        aten({"prod.dim_int": "*, @ -> *-@", "prod": "... -> ()"}),
        buffers=_product_buffers,
        fuses=True,
    ),
    OpFamily(aten({"nansum": "*, @ -> *-@ | sum @"}), buffers=partial(_formula_buffers, count=2), fuses=True),
    OpFamily(aten({"logsumexp": "*, @ -> *-@"}), buffers=_log_sum_buffers, fuses=True),
    OpFamily(aten({"amax amin": "*, @ -> *-@"}), buffers=_extreme_buffers, fuses=True),
    OpFamily(
        aten(
            {
                "var.dim var.correction std.dim std.correction": "*, @ -> *-@",
                "var std norm.Scalar": "... -> ()",
                "linalg_vector_norm linalg_norm norm.ScalarOpt_dim": "*, #, @ -> *-@",
            }
        ),
        buffers=partial(_formula_buffers, count=1),
        fuses=True,
    ),
    OpFamily(
        aten({"var_mean.correction std_mean.correction": "*, @ -> *-@, *-@"}),
        buffers=partial(_formula_buffers, count=2),
        fuses=True,
    ),
    OpFamily(aten({"pairwise_distance": _distance})),
)
