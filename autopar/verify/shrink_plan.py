"""Shrinks a plan to fewer devices, and a batch to fewer rows, so that `verify` is fast.

A plan's assignments say which axis splits which factor, not into how many slices, so its axes can be shortened.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from autopar.lower.compat import leaves_of, map_leaves
from autopar.placement import mesh_axes, refine_mesh
from autopar.plan import Plan, Stage
from autopar.program import Program
from autopar.schedules import schedule_problem, stage_group

__all__ = ["fewest_normalized", "merge_stages", "most_pieces", "shrink_inputs", "shrink_plan"]

Inputs = Sequence[Any] | Mapping[str, Any]


def shrink_plan(plan: Plan, max_world_size: int = 8) -> Plan:
    """`plan` with every axis shortened to its smallest prime factor, on at most `max_world_size` devices if possible.

    Axes beyond that limit are shortened to 1, outermost first, so that the factors that they split are whole; at least
    one axis stays.  Several microbatches become few, without stages two.

    Stages run on as many device groups as are possible within the limit, at least two.  With fewer groups, consecutive
    stages are merged, so that the remaining cuts are those of the plan, and the schedule has as many stages per group
    as before.
    """
    if plan.world_size <= max_world_size:
        return plan
    refined = refine_mesh(plan.shared_mesh, *(strategy.mesh for strategy in plan.strategies))
    sizes = [_smallest_factor(size) for size in refined]
    for index in range(len(sizes) - 1):
        if math.prod(sizes) * min(plan.num_groups, 2) > max_world_size:
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

    small = plan.with_decisions(
        world_size=math.prod(sizes) * plan.num_groups,
        strategies=tuple(replace(strategy, mesh=shrink(strategy.mesh)) for strategy in plan.strategies),
        shared_mesh=shrink(plan.shared_mesh),
    )
    if not plan.stages:
        return small.with_decisions(num_microbatches=min(plan.num_microbatches, 2))
    small = merge_stages(small, min(plan.num_groups, max(2, max_world_size // math.prod(sizes))))
    return small.with_decisions(num_microbatches=_few_microbatches(small))


def most_pieces(plan: Plan) -> int:
    """The smallest number that all of the plan's numbers of pieces divide."""
    return math.lcm(*(count for strategy in plan.strategies for _, count in strategy.pieces))


def merge_stages(plan: Plan, num_groups: int) -> Plan:
    """`plan` with its stages on `num_groups` device groups; consecutive stages are merged."""
    groups, stages = plan.num_groups, plan.stages
    count = len(stages) // groups * num_groups
    bounds = [index * len(stages) // count for index in range(count + 1)]
    merged = tuple(
        Stage(stages[first].start, stages[stop - 1].stop, stage_group(plan.schedule, index, num_groups))
        for index, (first, stop) in enumerate(itertools.pairwise(bounds))
    )
    return plan.with_decisions(world_size=plan.group_size * num_groups, stages=merged)


def _few_microbatches(plan: Plan) -> int:
    """The smallest number of microbatches that keeps all groups busy and that the schedule can run.

    It divides the plan's number, so that the batch divides by it.
    """
    groups, planned = plan.num_groups, plan.num_microbatches
    divisors = [count for count in range(1, planned + 1) if planned % count == 0]
    legal = [n for n in divisors if not schedule_problem(plan.schedule, groups, len(plan.stages), n)]
    return next((count for count in legal if count >= groups), legal[-1])


def _smallest_factor(size: int) -> int:
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)


def shrink_inputs(inputs: Inputs, multiple: int) -> Iterator[Inputs]:
    """Yield smaller batches: with all dims shortened to `multiple`, then with only the first dims shortened.

    A dim is shortened if it is larger than `multiple` and divisible by it.  Only tracing the model shows which of these
    batches it accepts.
    """
    for limit in (None, 1):
        shrunk = _shorten_all(inputs, multiple, limit)
        if any(a.shape != b.shape for a, b in zip(_tensors(shrunk), _tensors(inputs), strict=True)):
            yield shrunk


def fewest_normalized(program: Program) -> float:
    """The fewest values of a channel that a batch norm of `program` takes statistics of; inf without batch norms."""
    norms = [op for layer in program.layers for op in layer.ops if op.target == "autopar.batch_norm"]
    inputs = [program.values[op.operands[0]].type for op in norms]
    return min((x.num_elements // x.shape[1] for x in inputs), default=math.inf)


def _shorten(x: Tensor, multiple: int, num_dims: int | None) -> Tensor:
    for dim in range(x.dim() if num_dims is None else min(num_dims, x.dim())):
        if x.shape[dim] > multiple and x.shape[dim] % multiple == 0:
            x = x.narrow(dim, 0, multiple)
    return x.contiguous()


def _shorten_all(inputs: Inputs, multiple: int, num_dims: int | None) -> Inputs:
    return map_leaves(lambda x: _shorten(x, multiple, num_dims) if isinstance(x, Tensor) else x, inputs)


def _tensors(inputs: Inputs) -> list[Tensor]:
    return [x for x in leaves_of(inputs) if isinstance(x, Tensor)]
