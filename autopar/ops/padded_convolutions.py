"""Convolutions of a padded input as one op, so that they split in space: ``convolution(pad(x))``.

A padded tensor has no equal slices that match those of the result, but its input has: the rows of padding take the
place of a neighbor's rows before the first slice and after the last one (`autopar.ops.halos`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from autopar.ops.family import Buffers, OpFamily, Types
from autopar.ops.halos import SPACE_DIMS, Halo, halo_kernels, halo_of, space_names
from autopar.ops.products import convolution_line, work_of_convolution
from autopar.ops.work import Work
from autopar.program import Arg, Op

__all__ = ["FAMILIES", "PADDED_CONVOLUTION", "width_pairs"]

PADDED_CONVOLUTION = "autopar.padded_convolution"
"""(x, weight, bias, stride, padding, dilation, groups, widths, mode, value): those of a convolution, with a number for
each spatial dim, and those of ``torch.nn.functional.pad`` for all spatial dims."""

_WIDTHS, _MODE, _VALUE = 7, 8, 9


def width_pairs(widths: Arg) -> list[tuple[int, int]]:
    """Rows before and after each padded dim, the first dim first."""
    numbers = cast("Sequence[int]", widths)
    return list(zip(numbers[-2::-2], numbers[::-2], strict=True))


def _halos(op: Op, operand_types: Types) -> tuple[Halo | None, ...]:
    """The halo of each spatial dim; None where the convolution itself pads a dim whose padding is not of zeros."""
    x, weight = (kind.shape for kind in operand_types[:2])
    value = op.args[_MODE] == "constant" and op.args[_VALUE]
    numbers = (cast("Sequence[int]", op.args[at]) for at in (3, 4, 5))
    return tuple(
        None
        if padding and (before or after or value)
        else halo_of(
            size, (size + before + after + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1,
            kernel, stride, before + padding, dilation,
        )
        for size, kernel, stride, padding, dilation, (before, after) in zip(
            x[2:], weight[2:], *numbers, width_pairs(op.args[_WIDTHS]), strict=True
        )
    )  # fmt: skip


def _rule(op: Op, operand_types: Types, result_types: Types) -> str:
    names, remarks = space_names(_halos(op, operand_types), "halo_padded_convolution")
    return convolution_line(operand_types, op.args[6], names, remarks)


def _padded_bytes(op: Op, operands: Types) -> float:
    x = operands[0]
    sizes = x.shape[:2] + tuple(
        size + sum(pair) for size, pair in zip(x.shape[2:], width_pairs(op.args[_WIDTHS]), strict=True)
    )
    return x.num_bytes * math.prod(sizes) / max(1, x.num_elements)


def _work(op: Op, operands: Types, results: Types) -> Work:
    """The convolution, and a copy of its input forward and of its gradient backward."""
    work, padded = work_of_convolution(op, operands, results), _padded_bytes(op, operands)
    return replace(
        work,
        read_bytes=work.read_bytes + padded,
        write_bytes=work.write_bytes + padded,
        backward_read_bytes=work.backward_read_bytes + padded,
        backward_write_bytes=work.backward_write_bytes + padded,
    )


def _buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
    """Autograd saves the padded input in place of the input, and its gradient is as large."""
    padded = _padded_bytes(op, operands)
    return Buffers(forward=padded, backward=padded * trains[0], kept=padded * trains[1])


def _least(op: Op, operands: Types, *, dim: int) -> int:
    """A slice at an edge that is reflected has a row more than its reflection."""
    halo = _halos(op, operands)[dim - SPACE_DIMS[0]]
    return 1 if halo is None else halo.least_rows + (op.args[_MODE] == "reflect")


FAMILIES = (
    OpFamily(
        {PADDED_CONVOLUTION: _rule},
        is_cheap=False,
        function="padded_convolution",
        count_work=_work,
        saves=lambda op, operands, results: ((0, 1), 0),
        kernels={
            name: replace(kernel, least=partial(_least, dim=dim))
            for dim, (name, kernel) in zip(
                SPACE_DIMS, halo_kernels("halo_padded_convolution", _halos).items(), strict=True
            )
        },
        buffers=_buffers,
    ),
)
