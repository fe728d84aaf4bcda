"""Elementwise ops, with broadcasting: every dim is a factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from autopar.ops.family import Buffers, OpFamily, Types, aten
from autopar.ops.memory_order import new, same
from autopar.ops.work import Work, dtype_of, floating, sum_bytes
from autopar.program import Op

__all__ = ["FAMILIES"]


def _overloads(names: str, overloads: str) -> str:
    """``_overloads("add sub", "Tensor Scalar")`` names the four ops ``add.Tensor`` ... ``sub.Scalar``."""
    return " ".join(f"{name}.{overload}" for name in names.split() for overload in overloads.split())


_UNARY = """
    angle bitwise_not celu ceil elu exp floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu
    log log_sigmoid logical_not logit mish nan_to_num relu relu6 round round.decimals selu sgn sigmoid sign signbit silu
    softplus softshrink special_expit tanh threshold trunc
"""
# What torch derives by a formula of several ops, such as ``grad * (2 * x.pow(1))`` for a square, by the number of
# tensors that are there besides the gradients when the last one runs (tests/ops/test_backward_buffers.py counts them).
_BY_FORMULA = {
    1: "abs cosh digamma exp2 expm1 lgamma log10 log1p log2 sin sinh special_log1p sqrt",
    2: "atan cos reciprocal rsqrt square tan",
    3: "acosh asinh atanh",
    4: "asin erf erfc erfinv",
    5: "acos",
    7: "sinc",
}
_BY_FORMULA_OF_TWO = {
    1: "copysign.Tensor copysign.Scalar xlogy.Scalar_Self pow.Scalar",
    2: "hypot pow.Tensor_Scalar",
    3: "fmod.Tensor remainder.Tensor xlogy.Tensor polar "
    "fmax fmin clamp_min.Tensor clamp_max.Tensor maximum minimum max.other min.other",  # of torch 2.14; before, 1 or 2
    4: "logaddexp logaddexp2",
    5: "pow.Tensor_Tensor",
    6: "atan2",
}
_BY_FORMULA_OF_THREE = {1: "addcmul lerp.Scalar", 3: "lerp.Tensor clamp.Tensor clip.Tensor", 4: "addcdiv"}
_COMPARE = "eq ne lt le gt ge"
_BITS = "bitwise_and bitwise_or bitwise_xor"

_TABLE = {
    _UNARY: "* -> *",
    "neg clone _to_copy to.dtype to.dtype_layout to.device": "* -> * | plus 0",
    _overloads(_COMPARE, "Tensor Scalar"): "*, * -> *",
    _overloads(_BITS, "Tensor Scalar Scalar_Tensor"): "*, * -> *",
    _overloads("__and__ __or__ __xor__", "Tensor Scalar"): "*, * -> *",
    _overloads("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar Scalar_Tensor"): "*, * -> *",
    "fmod.Scalar remainder.Scalar remainder.Scalar_Tensor": "*, * -> *",
    _overloads("floor_divide", "default Scalar"): "*, * -> *",
    "xlogy.Scalar_Other": "*, * -> *",
    "logical_and logical_or logical_xor heaviside isclose": "*, * -> *",
    _overloads("where", "ScalarOther ScalarSelf Scalar"): "*, *, * -> *",
    "masked_fill.Scalar": "*, *, * -> *",
    "bitwise_not conj _conj resolve_conj resolve_neg real imag": "* -> *",
    "copy fill.Tensor complex": "*, * -> *",
    "fill.Scalar": "* -> *",
}


def _prelu(op: Op, operand_types: Types, result_types: Types) -> str:
    """prelu(x, weight): one weight for each channel (dim 1), or one for all."""
    return "*, _ -> *" if len(operand_types[0].shape) < 2 else "n c ..., c -> n c ..."


def _work_of_sum(op: Op, operands: Types, results: Types) -> Work:
    """The gradient is passed on unchanged to operands of the same shape, and summed for broadcast ones."""
    broadcast = tuple(t for t in floating(operands) if t.num_elements < results[0].num_elements)
    return Work(
        "bytes",
        dtype_of(operands, results),
        read_bytes=sum_bytes(operands),
        write_bytes=sum_bytes(results),
        backward_read_bytes=sum_bytes(results) * len(broadcast),
        backward_write_bytes=sum_bytes(broadcast),
        num_backward_kernels=len(broadcast),
        is_passed_on=True,
    )


def _formula_buffers(
    op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool, *, count: int
) -> Buffers:
    """The backward runs several kernels, with so many tensors of the result's size in between."""
    return Buffers(backward=float(count * results[0].num_bytes))


def _broadcast_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """The gradient of a broadcast operand is computed in the result's size, and then summed."""
    size = results[0].num_elements
    needs_sum = any(kind.num_elements < size for kind, trained in zip(operands, trains, strict=True) if trained)
    return Buffers(backward=results[0].num_bytes if needs_sum else 0.0)


def _quotient_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """The gradient of a divisor is ``-grad * ((x / divisor) / divisor)``."""
    if trains[1:] and trains[1]:
        return Buffers(backward=3.0 * results[0].num_bytes)
    return _broadcast_buffers(op, operands, results, trains, has_kernel)


def _formula_families(by_count: Mapping[int, str], rule: str) -> tuple[OpFamily, ...]:
    return tuple(
        OpFamily(aten({names: rule}), buffers=partial(_formula_buffers, count=count))
        for count, names in by_count.items()
    )


def _clamp_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """The backward makes a mask of a byte for each element and limit."""
    count = sum(isinstance(arg, int | float) for arg in (*op.args, *(arg for _, arg in op.kwargs)))
    return Buffers(backward=float(count * results[0].num_elements))


FAMILIES = (
    OpFamily(aten(_TABLE)),
    OpFamily(aten({"clamp clip": "*, *, * -> *", "clamp_min clamp_max": "*, * -> *"}), buffers=_clamp_buffers),
    *_formula_families(_BY_FORMULA, "* -> *"),
    *_formula_families(_BY_FORMULA_OF_TWO, "*, * -> *"),
    *_formula_families(_BY_FORMULA_OF_THREE, "*, *, * -> *"),
    OpFamily(
        aten({"add.Tensor": "*, * -> * | plus 0 1", "add.Scalar": "* -> *"}), count_work=_work_of_sum, gradient="passed"
    ),
    OpFamily(
        aten({"sub.Tensor": "*, * -> * | plus 0 1", "sub.Scalar": "* -> *", "rsub.Tensor rsub.Scalar": "*, * -> *"}),
        count_work=_work_of_sum,
        buffers=_broadcast_buffers,
    ),
    OpFamily(
        aten(
            {
                "mul.Tensor": "*, * -> * | plus 0, plus 1",
                "mul.Scalar": "* -> * | plus 0",
                "where.self": "*, *, * -> * | plus 1 2",
                "masked_fill.Tensor": "*, *, * -> *",
            }
        ),
        buffers=_broadcast_buffers,
    ),
    OpFamily(
        aten(
            {
                "div.Tensor": "*, * -> * | plus 0",
                "div.Scalar": "* -> * | plus 0",
                _overloads("div", "Tensor_mode Scalar_mode"): "*, * -> *",
            }
        ),
        buffers=_quotient_buffers,
    ),
    OpFamily(aten({"contiguous": "* -> * | plus 0"}), place=new),
    OpFamily(aten({"type_as": "*, ... -> *", "bucketize.Tensor": "*, _ -> *"}), fuses=True),
    OpFamily(aten({"prelu": _prelu}), buffers=partial(_formula_buffers, count=2), fuses=True),
    OpFamily(aten({"alias lift_fresh_copy": "* -> * | plus 0"}), is_view=True, place=same),
    OpFamily(aten({"detach": "* -> * | plus 0"}), is_view=True, place=same, num_differentiable=0),
)
