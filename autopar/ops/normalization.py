"""Normalizations: the dims over which statistics are computed stay whole, or need a kernel that communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ops.family import Buffers, Kernel, OpFamily, Rule, Saves, Types, argument, aten
from autopar.ops.halos import space_factor
from autopar.ops.views import dim_names, text_of, without
from autopar.ops.work import Work, sum_bytes
from autopar.program import KernelCollective, Op, itemsize_bytes

__all__ = ["FAMILIES"]


def _trailing(num_results: int) -> Rule:
    """layer_norm, rms_norm (x, normalized_shape, weight, bias): the last dims, which are normalized, stay whole.

    The native forms also return statistics, of size 1 in those dims.
    """

    def rule(op: Op, operand_types: Types, result_types: Types) -> str | None:
        shape = argument(op, 1, "normalized_shape")
        if not isinstance(shape, tuple) or not shape:
            return None
        whole = " _" * len(shape)
        results = ", ".join([f"*{whole}"] * num_results)
        return f"*{whole}, #, weight: {whole}, bias: {whole} -> {results}"

    return rule


def _batch_norm(op: Op, operand_types: Types, result_types: Types) -> str | None:
    """batch_norm(x, weight, bias, mean, var, training, ...): with fixed statistics every dim splits, otherwise only
    channels.
    """
    if len(operand_types[0].shape) < 2:
        return None
    dims = "_ c ..." if argument(op, 5, "training") else "n c *"
    return f"{dims}, c, c, c, c -> {dims}"


def _own_batch_norm(op: Op, operand_types: Types, result_types: Types) -> str:
    """batch_norm(x, weight, bias, running_mean, running_var, ...): splitting batch or space needs the kernel."""
    names = dim_names(len(operand_types[0].shape))
    names[1] = "c"
    x = " ".join(names)
    remarks = ", ".join(f"by {factor} sync_batch_norm" for factor in without(names, 1))
    return f"{x}, c, c, c, c -> {x}, c, c | {remarks}"


def _group_norm(op: Op, operand_types: Types, result_types: Types) -> str:
    """group_norm(x, groups, weight, bias, eps): splitting space needs the kernel."""
    names = ["n", "_", *(space_factor(dim) for dim in range(2, len(operand_types[0].shape)))]
    remarks = ", ".join(f"by {factor} space_group_norm" for factor in names[2:])
    return f"{text_of(names)}, #, _, _ -> {text_of(names)}" + (f" | {remarks}" if remarks else "")


def _group_collectives(op: Op, operand_types: Types) -> tuple[KernelCollective, ...]:
    """Two sums for each row and group: forward one after the other, backward at once, if the input has a gradient."""
    x, groups = operand_types[0], argument(op, 1, "num_groups")
    if not isinstance(groups, int):
        return ()
    dropped = tuple(range(1, len(x.shape)))
    dtype = "float64" if x.dtype == "float64" else "float32"
    forward = KernelCollective("all_reduce", "forward", 0, dropped, dtype, groups)
    backward = KernelCollective("all_reduce", "backward", 0, dropped, dtype, 2 * groups, is_of_gradient=True)
    return forward, forward, backward


def _group_buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """The kernel computes in float32 at least: the input and the result forward, also both gradients backward."""
    if not has_kernel:
        return Buffers()
    wide = operands[0].num_elements * max(itemsize_bytes("float32"), itemsize_bytes(operands[0].dtype))
    return Buffers(forward=2.0 * wide, backward=3.0 * wide)


def _collectives(op: Op, operand_types: Types) -> tuple[KernelCollective, ...]:
    """Two sums for each channel, forward and backward."""
    x = operand_types[0]
    dropped = (0, *range(2, len(x.shape)))  # all dims but the channels
    dtype = "float64" if x.dtype == "float64" else "float32"
    return tuple(KernelCollective("all_reduce", phase, 0, dropped, dtype, count=2) for phase in ("forward", "backward"))


def _work(op: Op, operands: Types, results: Types) -> Work:
    """Every large tensor is read twice, forward and backward: for the statistics, then for the values."""
    whole, rest = operands[0].num_bytes, sum_bytes(operands[1:])
    return Work(
        "bytes",
        operands[0].dtype,
        read_bytes=2 * whole + rest,
        write_bytes=sum_bytes(results),
        backward_read_bytes=4 * whole + rest,
        backward_write_bytes=whole + rest,
        num_backward_kernels=2,
    )


def _saves(op: Op, operands: Types, results: Types) -> Saves:
    has_weight = argument(op, 1, "weight") is not None
    return ((0, 1) if has_weight else (0,)), 2 * operands[0].shape[1] * itemsize_bytes("float32")


def _root_mean_square_saves(op: Op, operands: Types, results: Types) -> Saves | None:
    """One kernel of GPUs saves the input, the weight and a float32 of each row.

    It needs one dtype of both; otherwise several ops run, as on CPUs (at::native::rms_norm, torch 2.9 to 2.13).
    """
    x, shape = operands[0], argument(op, 1, "normalized_shape")
    if not isinstance(shape, tuple) or len({operand.dtype for operand in operands}) > 1:
        return None
    rows = math.prod(x.shape[: len(x.shape) - len(shape)])
    return tuple(range(len(operands))), rows * max(itemsize_bytes("float32"), itemsize_bytes(x.dtype))


FAMILIES = (
    OpFamily(
        aten({"rms_norm": _trailing(1), "_fused_rms_norm": _trailing(2)}),
        saves=_root_mean_square_saves,
        runs_plain=True,
        fuses=True,
    ),
    OpFamily(
        aten(
            {
                "layer_norm": _trailing(1),
                "native_layer_norm": _trailing(3),
                "instance_norm": "n c ..., c, c, _, _ -> n c ...",
            }
        ),
        fuses=True,
    ),
    OpFamily(
        aten(
            {
                "batch_norm": _batch_norm,
                "native_batch_norm": None,
                "native_group_norm": None,
            }
        ),
        count_work=_work,
    ),
    OpFamily(
        aten({"group_norm": _group_norm}),
        kernels={"space_group_norm": Kernel(_group_collectives, is_in_space=True)},
        buffers=_group_buffers,
        count_work=_work,
    ),
    OpFamily(aten({"_native_batch_norm_legit _native_batch_norm_legit_functional": None}), num_differentiable=1),
    OpFamily(
        {"autopar.batch_norm": _own_batch_norm},
        function="batch_norm",
        kernels={"sync_batch_norm": Kernel(_collectives, uses_statistics=True)},
        count_work=_work,
        saves=_saves,
        num_differentiable=1,
    ),
)
