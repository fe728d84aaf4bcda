"""Ops that create tensors from sizes.  Constant content can be created slice by slice."""

from __future__ import annotations

from autopar.ops.family import OpFamily, Types, aten, packet_name
from autopar.ops.memory_order import new
from autopar.ops.work import Work, dtype_of, sum_bytes
from autopar.program import Op

__all__ = ["FAMILIES", "filled_with"]

_FILLED = {"zeros": 0, "ones": 1, "full": None}  # by the number in the name; None: it is the last argument


def filled_with(op: Op) -> bool | float | None:
    """The number that all entries are of what `op` creates; None: it creates none of one known number."""
    kind = packet_name(op.target).removeprefix("aten.").removeprefix("new_").removesuffix("_like")
    if kind not in _FILLED:
        return None
    number = op.args[-1] if _FILLED[kind] is None else _FILLED[kind]
    return number if isinstance(number, bool | int | float) else None


def _new(op: Op, operand_types: Types, result_types: Types) -> str:
    """new_zeros(x, sizes) ...: only the dtype and device of x matter; if it has as many dims as the result, dims of
    equal sizes are split together.
    """
    given, made = operand_types[0].shape, result_types[0].shape
    dims = " ".join(f"d{dim}" for dim in range(len(made))) or "()"
    if len(given) != len(made):
        return f"..., # -> {dims}"
    along = " ".join(f"d{dim}" if size == made[dim] else "_" for dim, size in enumerate(given)) or "()"
    return f"{along}, # -> {dims}"


def _work(op: Op, operands: Types, results: Types) -> Work:
    """The result is written, and there is no backward."""
    return Work("bytes", dtype_of(operands, results), write_bytes=sum_bytes(results), num_backward_kernels=0)


FAMILIES = (
    OpFamily(aten({"full zeros ones": "# -> *"}), size_args=(0,), count_work=_work, fuses=True),
    OpFamily(aten({"empty.memory_format": "# -> *"}), size_args=(0,), count_work=_work, is_uninitialized=True),
    OpFamily(
        aten({"zeros_like ones_like full_like": "* -> *"}),
        count_work=_work,
        num_differentiable=0,
        place=new,
        fuses=True,
    ),
    OpFamily(aten({"empty_like": "* -> *"}), count_work=_work, num_differentiable=0, place=new, is_uninitialized=True),
    OpFamily(
        aten({"new_zeros new_ones new_full new_empty": _new}), size_args=(1,), count_work=_work, num_differentiable=0
    ),
    OpFamily(
        aten({"arange arange.start arange.start_step linspace eye eye.m scalar_tensor": "#, #, # -> ..."}),
        count_work=_work,
    ),
)
