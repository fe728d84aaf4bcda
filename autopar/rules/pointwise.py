"""Ops that work element by element, with broadcasting: every dim is a factor."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import Op
from autopar.rules.rule import Line, Rule, Types, argument, lines

__all__ = ["RULES"]


def _overloads(names: str, overloads: str) -> str:
    """``_overloads("add sub", "Tensor Scalar")`` names the four ops ``add.Tensor`` ... ``sub.Scalar``."""
    return " ".join(f"{name}.{overload}" for name in names.split() for overload in overloads.split())


_UNARY = """
    abs acos acosh angle asin asinh atan atanh bitwise_not celu ceil cos cosh digamma elu erf erfc erfinv
    exp exp2 expm1 floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma
    log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num reciprocal relu relu6 round
    round.decimals rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_expit
    special_log1p sqrt square tan tanh threshold trunc
"""
_COMPARE = "eq ne lt le gt ge"
_BITS = "bitwise_and bitwise_or bitwise_xor"

_TABLE = {
    _UNARY: "* -> *",
    "neg clone contiguous": "* -> * | plus 0",
    _overloads("add sub", "Tensor"): "*, * -> * | plus 0 1",
    _overloads("add sub", "Scalar"): "* -> *",
    _overloads("mul", "Tensor"): "*, * -> * | plus 0, plus 1",
    _overloads("div", "Tensor"): "*, * -> * | plus 0",
    _overloads("mul div", "Scalar"): "* -> * | plus 0",
    _overloads("div", "Tensor_mode Scalar_mode"): "*, * -> *",
    _overloads("rsub", "Tensor Scalar"): "*, * -> *",
    _overloads("pow", "Tensor_Tensor Tensor_Scalar Scalar"): "*, * -> *",
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
    "type_as": "*, ... -> *",
    "bucketize.Tensor": "*, _ -> *",
}

_RANDOM = {
    "native_dropout": "* -> *, *",
    "bernoulli bernoulli.p rand_like randn_like normal_functional uniform": "* -> *",
}


def _convert(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """Changes of dtype or device: linear between floating dtypes."""
    is_linear = operand_types[0].is_floating and result_types[0].is_floating
    return Line("* -> * | plus 0" if is_linear else "* -> *")


def _dropout(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """Drops nothing outside of training."""
    return Line("* -> *", is_random=bool(argument(op, 2, "train", True)))


def _prelu(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """prelu(x, weight): one weight for each channel (dim 1), or one for all."""
    if len(operand_types[0].shape) < 2:
        return Line("*, _ -> *")
    return Line("n c ..., c -> n c ...")


RULES: Mapping[str, Rule] = {
    **lines(_TABLE),
    **lines(_RANDOM, is_random=True),
    **lines({"alias lift_fresh_copy": "* -> * | plus 0"}, is_view=True),
    **lines({"detach": "* -> * | plus 0"}, is_view=True),
    "aten._to_copy.default": _convert,
    "aten.to.dtype": _convert,
    "aten.to.dtype_layout": _convert,
    "aten.to.device": _convert,
    "aten.dropout.default": _dropout,
    "aten.prelu.default": _prelu,
}
