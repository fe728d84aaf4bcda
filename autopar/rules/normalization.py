"""Normalisations: the dims over which statistics are taken stay whole."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import Op
from autopar.rules.rule import Line, Rule, Types, argument, lines

__all__ = ["RULES"]

_TABLE = {
    "group_norm": "n ..., #, _, _ -> n ...",
    "instance_norm": "n c ..., c, c, _, _ -> n c ...",
}


def _trailing(num_results: int) -> Rule:
    """layer_norm, rms_norm (x, normalized_shape, weight, bias): the last dims, as many as the shape has,
    stay whole.

    The native forms also return statistics, of size 1 in those dims.
    """

    def rule(op: Op, operand_types: Types, result_types: Types) -> Line | None:
        shape = argument(op, 1, "normalized_shape")
        if not isinstance(shape, tuple) or not shape:
            return None
        whole = " _" * len(shape)
        results = ", ".join([f"*{whole}"] * num_results)
        return Line(f"*{whole}, #, weight: {whole}, bias: {whole} -> {results}")

    return rule


def _batch_norm(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """batch_norm(x, weight, bias, mean, var, training, ...): with fixed statistics every dim splits, else
    channels do.
    """
    if len(operand_types[0].shape) < 2:
        return None
    dims = "_ c ..." if argument(op, 5, "training") else "n c *"
    return Line(f"{dims}, c, c, c, c -> {dims}")


RULES: Mapping[str, Rule] = {
    **lines(_TABLE),
    "aten.layer_norm.default": _trailing(1),
    "aten.rms_norm.default": _trailing(1),
    "aten.native_layer_norm.default": _trailing(3),
    "aten._fused_rms_norm.default": _trailing(2),
    "aten.batch_norm.default": _batch_norm,
}
