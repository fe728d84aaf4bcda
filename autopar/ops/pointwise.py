"""Elementwise ops, with broadcasting: every dim is a factor."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ops.family import Buffers, OpFamily, Types, aten
from autopar.ops.memory_order import new, same
from autopar.ops.work import Work, dtype_of, floating, sum_bytes
from autopar.program import Op

__all__ = ["FAMILIES", "another_result"]


def _overloads(names: str, overloads: str) -> str:
    """``_overloads("add sub", "Tensor Scalar")`` names the four ops ``add.Tensor`` ... ``sub.Scalar``."""
    return " ".join(f"{name}.{overload}" for name in names.split() for overload in overloads.split())


_UNARY = """
    abs acos acosh angle asin asinh atan atanh bitwise_not celu ceil cos cosh digamma elu erf erfc erfinv
    exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma
    log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num reciprocal relu relu6 round
    round.decimals selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_expit
    special_log1p square tan tanh threshold trunc
"""
_COMPARE = "eq ne lt le gt ge"
_BITS = "bitwise_and bitwise_or bitwise_xor"

_TABLE = {
    _UNARY: "* -> *",
    "neg clone _to_copy to.dtype to.dtype_layout to.device": "* -> * | plus 0",
    _overloads(_COMPARE, "Tensor Scalar"): "*, * -> *",
    _overloads(_BITS, "Tensor Scalar Scalar_Tensor"): "*, * -> *",
    _overloads("__and__ __or__ __xor__", "Tensor Scalar"): "*, * -> *",
    _overloads("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar Scalar_Tensor"): "*, * -> *",
    _overloads("fmod", "Tensor Scalar"): "*, * -> *",
    _overloads("remainder", "Tensor Scalar Scalar_Tensor"): "*, * -> *",
    _overloads("floor_divide", "default Scalar"): "*, * -> *",
    _overloads("xlogy", "Tensor Scalar_Other Scalar_Self"): "*, * -> *",
    "logical_and logical_or logical_xor maximum minimum fmax fmin max.other min.other": "*, * -> *",
    "atan2 hypot logaddexp logaddexp2 heaviside copysign.Tensor copysign.Scalar isclose": "*, * -> *",
    "where.self": "*, *, * -> * | plus 1 2",
    _overloads("where", "ScalarOther ScalarSelf Scalar"): "*, *, * -> *",
    "masked_fill.Scalar masked_fill.Tensor": "*, *, * -> *",
    "clamp clamp.Tensor clip clip.Tensor": "*, *, * -> *",
    "clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor": "*, * -> *",
    _overloads("lerp", "Scalar Tensor"): "*, *, * -> *",
    "addcmul addcdiv": "*, *, * -> *",
    "bitwise_not conj _conj resolve_conj resolve_neg real imag": "* -> *",
    "copy fill.Tensor polar complex": "*, * -> *",
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


def another_result(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """The backward runs several kernels, with one more tensor of the result's size in between."""
    return Buffers(backward=results[0].num_bytes)


def _product_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """The gradient of a broadcast operand is computed in the result's size, and then summed."""
    size = results[0].num_elements
    needs_sum = any(kind.num_elements < size for kind, trained in zip(operands, trains, strict=True) if trained)
    return Buffers(backward=results[0].num_bytes if needs_sum else 0.0)


FAMILIES = (
    OpFamily(aten(_TABLE)),
    OpFamily(
        aten({"add.Tensor": "*, * -> * | plus 0 1", "add.Scalar": "* -> *"}), count_work=_work_of_sum, gradient="passed"
    ),
    OpFamily(
        aten({"sub.Tensor": "*, * -> * | plus 0 1", "sub.Scalar": "* -> *", "rsub.Tensor rsub.Scalar": "*, * -> *"}),
        count_work=_work_of_sum,
    ),
    OpFamily(
        aten({"mul.Tensor": "*, * -> * | plus 0, plus 1", "mul.Scalar": "* -> * | plus 0"}), buffers=_product_buffers
    ),
    OpFamily(
        aten(
            {
                "div.Tensor": "*, * -> * | plus 0",
                "div.Scalar": "* -> * | plus 0",
                _overloads("div", "Tensor_mode Scalar_mode"): "*, * -> *",
                _overloads("pow", "Tensor_Tensor Tensor_Scalar Scalar"): "*, * -> *",
                "rsqrt sqrt": "* -> *",
            }
        ),
        buffers=another_result,
    ),
    OpFamily(aten({"contiguous": "* -> * | plus 0"}), place=new),
    OpFamily(aten({"type_as": "*, ... -> *", "bucketize.Tensor": "*, _ -> *", "prelu": _prelu}), fuses=True),
    OpFamily(aten({"alias lift_fresh_copy": "* -> * | plus 0"}), is_view=True, place=same),
    OpFamily(aten({"detach": "* -> * | plus 0"}), is_view=True, place=same, num_differentiable=0),
)
