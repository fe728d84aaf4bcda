"""Ops that make tensors from sizes.  Constant content can be made slice by slice."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.program import Op
from autopar.rules.rule import Line, Rule, Types, lines

__all__ = ["RULES"]


def _new(op: Op, operand_types: Types, result_types: Types) -> Line | None:
    """new_zeros(x, sizes) ...: x gives only its dtype and device; with equal shapes it is split along."""
    is_alike = operand_types[0].shape == result_types[0].shape
    dims = " ".join(f"d{dim}" for dim in range(len(result_types[0].shape))) or "()"
    return Line(f"{dims if is_alike else '...'}, # -> {dims}", size_args=(1,))


RULES: Mapping[str, Rule] = {
    **lines({"full zeros ones empty.memory_format": "# -> *"}, size_args=(0,)),
    **lines({"zeros_like ones_like full_like empty_like": "* -> *"}),
    **lines({"rand randn": "# -> ..."}, is_random=True),
    **lines({"arange arange.start arange.start_step linspace eye eye.m scalar_tensor": "#, #, # -> ..."}),
    **{f"aten.new_{name}.default": _new for name in ("zeros", "ones", "full", "empty")},
}
