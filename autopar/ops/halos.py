"""Splits of images and videos in space: which rows of the input a slice of the output needs.

The factor of tensor dim d is called ``space<d>``.  Output rows [a, b) of a convolution with stride s, padding p and a
kernel of k rows need the input rows [a s - p, (b - 1) s - p + k).  If the input has s rows for each row of the output,
equal slices of the output need the matching slices of the input, and a *halo*: p rows before and k - s - p rows after
each slice, which neighbors have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from autopar.ops.family import Buffers, Kernel, Types
from autopar.program import Arg, KernelCollective, Op

__all__ = [
    "SPACE_DIMS", "Halo", "Halos", "halo_buffers", "halo_kernels", "halo_of", "nearer_shift", "per_dim", "space_dim",
    "space_factor", "space_names", "transposed_halo_of",
]  # fmt: skip

SPACE_DIMS = (2, 3, 4)
"""The dims of ``[batch, channels, ...]`` tensors that are space, or time in a video."""

_FACTOR = re.compile(r"space(\d)")


class Halo(NamedTuple):
    """The input rows that a slice needs from the slices before and after it; `stride` input rows are one output row."""

    before: int
    after: int
    stride: int

    @property
    def is_empty(self) -> bool:
        """Whether a slice needs none."""
        return not (self.before or self.after)

    @property
    def least_rows(self) -> int:
        """The fewest rows of the output whose input is as large as the halo, so that it comes from neighbors alone."""
        return max(1, -(-max(self.before, self.after) // self.stride))


Halos = Callable[[Op, Types], "Sequence[Halo | None]"]
"""Returns the halo of each spatial dim, given an op and its operands' types; None for a dim that can't be split."""


def space_factor(dim: int) -> str:
    """The name of the factor that splits tensor dim `dim`, a spatial one."""
    return f"space{dim}"


def space_dim(factor: str) -> int:
    """The dim that a factor of this name splits in space; 0 for any other factor."""
    match = _FACTOR.fullmatch(factor)
    return int(match[1]) if match else 0


def halo_of(size: int, result: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> Halo | None:
    """The halo of every slice of a dim with `size` rows that becomes `result` rows; None if slices don't match."""
    before, after = padding, dilation * (kernel - 1) + 1 - stride - padding
    return Halo(before, max(0, after), stride) if size == stride * result and result > 1 else None


def transposed_halo_of(
    size: int, result: int, kernel: int, stride: int, padding: int, dilation: int = 1
) -> Halo | None:
    """The halo of a transposed convolution, which makes `stride` rows of each row; None if slices don't match.

    Row i of the input adds to the rows i stride - padding + dilation j of the result, for j from 0 to kernel - 1.  So
    the last row before a slice reaches up to dilation (kernel - 1) - padding - stride rows into it, and the first row
    after it up to `padding` rows.
    """
    before, after = (dilation * (kernel - 1) - padding) // stride, -(-padding // stride)
    return Halo(max(0, before), after, 1) if result == stride * size and size > 1 else None


def per_dim(arg: Arg, count: int, default: int) -> tuple[int, ...]:
    """An argument such as a stride as one number for each of `count` dims; () if it is none (``padding="same"``)."""
    numbers = arg if isinstance(arg, tuple) and arg else (default if arg is None or arg == () else arg,)
    sizes = tuple(number for number in numbers if isinstance(number, int))
    sizes = sizes * count if len(sizes) == 1 else sizes
    return sizes if len(sizes) == count else ()


def nearer_shift(shift: int, size: int) -> int:
    """The roll by `shift` rows of a dim of `size` rows in the direction in which it is fewer."""
    forward = shift % size
    return forward if 2 * forward <= size else forward - size


def space_names(halos: Sequence[Halo | None], kernel: str) -> tuple[list[str], list[str]]:
    """Per spatial dim its factor, "_" for none, and the remarks that name the kernels ``<kernel><dim>`` for halos."""
    names, remarks = list[str](), list[str]()
    for dim, halo in enumerate(halos, SPACE_DIMS[0]):
        names.append("_" if halo is None else space_factor(dim))
        if halo is not None and not halo.is_empty:
            remarks.append(f"by {names[-1]} {kernel}{dim}")
    return names, remarks


def halo_kernels(name: str, halos: Halos) -> dict[str, Kernel]:
    """The kernels ``<name>2``, ``<name>3`` and ``<name>4``, which receive the halos of that dim from neighbors.

    `halos` returns the halo of each spatial dim of a call, given the op and its operands' types.
    """
    return {
        f"{name}{dim}": Kernel(
            partial(_exchanges, halos=halos, dim=dim),
            least=partial(_least, halos=halos, dim=dim),
            is_in_space=True,
        )
        for dim in SPACE_DIMS
    }


def halo_buffers(halos: Halos) -> Callable[[Op, Types, Types, Sequence[bool], bool], Buffers]:
    """The bytes of a slice with its halo: autograd saves it in place of the slice, and its gradient is as large.

    The halo is that of the dim in which it is the largest part of a slice, whichever dim is split.
    """

    def buffers(op: Op, operands: Types, results: Types, trains: Sequence[bool], has_kernel: bool) -> Buffers:
        if not has_kernel:
            return Buffers()
        x = operands[0]
        parts = ((halo.before + halo.after) / x.shape[dim] for dim, halo in _halos_by_dim(op, operands, halos))
        padded = x.num_bytes * (1.0 + max(parts, default=0.0))
        keeps = trains[-1] if len(operands) == 1 else trains[1]  # pooling saves its input, a convolution for its weight
        return Buffers(forward=padded, backward=padded * trains[0], kept=padded * keeps)

    return buffers


def _halos_by_dim(op: Op, operands: Types, halos: Halos) -> Iterator[tuple[int, Halo]]:
    """Tensor dims with their halo; also of slices, which may be of one row."""
    return ((dim, halo) for dim, halo in enumerate(halos(op, operands), SPACE_DIMS[0]) if halo is not None)


def _halo(op: Op, operands: Types, halos: Halos, dim: int) -> Halo | None:
    return dict(_halos_by_dim(op, operands, halos)).get(dim)


def _exchanges(op: Op, operands: Types, *, halos: Halos, dim: int) -> tuple[KernelCollective, ...]:
    """A send to each neighbor that needs a halo; backward, if the input has a gradient, a send of each halo's."""
    halo = _halo(op, operands, halos, dim)
    return tuple(
        KernelCollective("send", phase, 0, (dim,), operands[0].dtype, rows, is_of_gradient=phase == "backward")
        for phase in ("forward", "backward")
        for rows in (halo[:2] if halo else ())
        if rows
    )


def _least(op: Op, operands: Types, *, halos: Halos, dim: int) -> int:
    halo = _halo(op, operands, halos, dim)
    return 1 if halo is None else halo.least_rows
