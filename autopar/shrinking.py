"""Make a rehearsal small: the same plan on fewer devices, the same model on smaller batches.

A plan says which axis splits which factor, not how far, so its axes can be shortened without changing what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from autopar.lower.compat import leaves_of, map_leaves
from autopar.placement import mesh_axes, refine_mesh
from autopar.plan import Plan

__all__ = ["shrink_inputs", "shrink_plan"]

Inputs = Sequence[Any] | Mapping[str, Any]


def shrink_plan(plan: Plan, max_world_size: int = 8) -> Plan:
    """`plan` with every axis shortened to its smallest factor, on at most `max_world_size` devices where that suffices.

    Axes that would make more devices than that are shortened to 1, outermost first, so what they split is whole in the
    rehearsal; at least one axis stays.  More than one microbatch become two.
    """
    if plan.world_size <= max_world_size:
        return plan
    refined = refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
    sizes = [_smallest_factor(size) for size in refined]
    for index in range(len(sizes) - 1):
        if math.prod(sizes) > max_world_size:
            sizes[index] = 1

    def shrink(mesh: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            math.prod(
                size
                for size, fine in zip(sizes, mesh_axes(refined), strict=True)
                if axis.stride <= fine.stride < axis.stride * axis.size
            )
            for axis in mesh_axes(mesh)
        )

    return replace(
        plan,
        world_size=math.prod(sizes),
        num_microbatches=min(plan.num_microbatches, 2),
        strategies=tuple(replace(strategy, mesh=shrink(strategy.mesh)) for strategy in plan.strategies),
        shared_mesh=shrink(plan.shared_mesh),
    )


def _smallest_factor(size: int) -> int:
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)


def shrink_inputs(inputs: Inputs, multiple: int) -> Iterator[Inputs]:
    """Ways to shrink a batch: all dims cut to `multiple`, only the first dims, and `inputs` as they are.

    A dim is cut if it is larger than `multiple` and divides by it.  Which of these batches the model takes, only
    tracing it tells.
    """
    for limit in (None, 1):
        shrunk = _cut_all(inputs, multiple, limit)
        if any(a.shape != b.shape for a, b in zip(_tensors(shrunk), _tensors(inputs), strict=True)):
            yield shrunk
    yield inputs


def _cut(x: Tensor, multiple: int, num_dims: int | None) -> Tensor:
    for dim in range(x.dim() if num_dims is None else min(num_dims, x.dim())):
        if x.shape[dim] > multiple and x.shape[dim] % multiple == 0:
            x = x.narrow(dim, 0, multiple)
    return x.contiguous()


def _cut_all(inputs: Inputs, multiple: int, num_dims: int | None) -> Inputs:
    return map_leaves(lambda x: _cut(x, multiple, num_dims) if isinstance(x, Tensor) else x, inputs)


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [x for x in leaves_of(inputs) if isinstance(x, Tensor)]
