"""What the code of a layer program calls in addition to ops: moves between layouts, microbatch slices, kernels,
random draws.

Their arguments are literals that read well in printed code: layouts as text, axes as ``(size, stride)``.  In a
compiled layer program, the code between calls of them is compiled, and they run as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.reshard_ops import reshard_tensor, time_slice
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels import KERNELS, PARTS, resolve_target
from autopar.lower.kernels.random import RandomState, makes_generators, random_scope
from autopar.lower.kernels.row_pieces import PiecewiseMove, moved_row_product, row_products_of_moved
from autopar.ops import family_of
from autopar.placement import Axis, Step, parse_layout, reshard

__all__ = [
    "LayerContext", "begin_kernel", "continue_kernel", "draw", "finish_kernel", "layout_steps", "microbatch_slice",
    "microbatch_term", "moved_product", "products_of_moved", "redistribute", "run_kernel",
]  # fmt: skip

AxisText = tuple[int, int]
# A matrix [k, n], what is added to every row, and whether the matrix is [n, k].
MatrixText = tuple[Tensor, Tensor | None, bool]


@dataclass(frozen=True, slots=True)
class LayerContext:
    """What one run of a layer program needs to know in addition to tensors.

    Args:
        communicator: of this rank.
        microbatch: 0-based.
        first_op: number of the layer's first op, counted through the program.
        random: the source of randomness, None in a program that draws nothing.
    """

    communicator: Communicator
    microbatch: int = 0
    first_op: int = 0
    random: RandomState | None = None


@lru_cache(maxsize=1 << 16)
def layout_steps(src: str, dst: str, mesh: tuple[int, ...]) -> tuple[Step, ...]:
    """`reshard` for layouts as text."""
    return reshard(parse_layout(src), parse_layout(dst), mesh)


def redistribute(x: Tensor, src: str, dst: str, mesh: tuple[int, ...], context: LayerContext) -> Tensor:
    """Move `x` from layout `src` to `dst` on `mesh`; its gradient moves back."""
    return reshard_tensor(x, layout_steps(src, dst, mesh), context.communicator)


def products_of_moved(
    x: Tensor,
    matrices: tuple[MatrixText, ...],
    src: str,
    dst: str,
    mesh: tuple[int, ...],
    cut: tuple[int, int],
    context: LayerContext,
) -> tuple[Tensor, ...]:
    """Products of `x` moved from `src` to `dst`, one for each of `matrices`.

    `cut` is a dim of rows, and into how many pieces; each is multiplied while the next one is under way.
    """
    (step,) = layout_steps(src, dst, mesh)
    return row_products_of_moved(x, PiecewiseMove(step, *cut, context.communicator), matrices)


def moved_product(
    x: Tensor,
    matrix: MatrixText,
    src: str,
    dst: str,
    mesh: tuple[int, ...],
    cut: tuple[int, int],
    context: LayerContext,
) -> Tensor:
    """A product of `x`, terms of a sum, moved from `src` to `dst`.

    `cut` is a dim of rows, and into how many pieces; each is under way while the next one is multiplied.
    """
    (step,) = layout_steps(src, dst, mesh)
    return moved_row_product(x, PiecewiseMove(step, *cut, context.communicator), *matrix)


def microbatch_slice(x: Tensor, dim: int, count: int, context: LayerContext) -> Tensor:
    """The running microbatch's slice of `x`, one of `count` along `dim`."""
    return time_slice(x, dim, context.microbatch, count)


def microbatch_term(x: Tensor, context: LayerContext) -> Tensor:
    """`x` in the first microbatch, zeros in the others: terms that add up to `x`."""
    # Not zeros_like: every microbatch is to give what x is made from a gradient, of zeros if need be.
    is_first = torch.full((), context.microbatch == 0, device=x.device)
    return torch.where(is_first, x, torch.zeros((), dtype=x.dtype, device=x.device))


def run_kernel(name: str, axes: tuple[AxisText, ...], context: LayerContext, *args: Any, **kwargs: Any) -> Any:
    """Run a special kernel that communicates on `axes`, outermost first."""
    return KERNELS[name](_shards(axes, context), *args, **kwargs)


def begin_kernel(name: str, axes: tuple[AxisText, ...], context: LayerContext, *args: Any, **kwargs: Any) -> Any:
    """Run the first part of a special kernel that communicates on `axes`; `continue_kernel` takes what this returns."""
    parts = PARTS[name](_shards(axes, context), *args, **kwargs)
    next(parts)
    return parts


def continue_kernel(parts: Any) -> None:
    """Run the second part."""
    next(parts)


def finish_kernel(parts: Any) -> Any:
    """Run the last part; what the kernel returns."""
    try:
        next(parts)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a kernel in parts has two pauses")


def _shards(axes: tuple[AxisText, ...], context: LayerContext) -> Shards:
    return Shards(context.communicator, tuple(Axis(*axis) for axis in axes))


def draw(
    target: str, op_index: int, axes: tuple[AxisText, ...], context: LayerContext, *args: Any, **kwargs: Any
) -> Any:
    """Run a random op: equal numbers on replicas, different ones on the shards that `axes` cut its result
    into.

    Args:
        target: as `Op.target`.
        op_index: the op's number in its layer.
        axes: the axes on which its first result is sharded, outermost first.
        context: says layer, microbatch and base seed.
        args: the op's arguments.
        kwargs: the op's keyword arguments.
    """
    random = context.random
    if random is None:
        raise ValueError(f"{target} draws random numbers, but this program was run without a source of them")
    shard = _shards(axes, context).index
    number = context.first_op + op_index
    if family_of(target).takes_generator and makes_generators(random.device):
        return resolve_target(target)(*args, **kwargs, generator=random.generator(number, shard))
    with random_scope(random.seed(number, shard), random.device):
        return resolve_target(target)(*args, **kwargs)
