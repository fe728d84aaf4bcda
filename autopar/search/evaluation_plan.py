"""A plan for evaluation whose stages are those of a training plan, so that no parameter moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ConstraintError
from autopar.plan import Plan
from autopar.program import Layer, Program
from autopar.schedules import simplest_schedule
from autopar.search.plan_search import search
from autopar.search.request import SearchRequest
from autopar.step.prices import Prices

__all__ = ["plan_like"]

# The price of a layer in another stage than the one that held its parameters, on a device group that has them: any
# positive number, as misplaced layers are counted.
_OTHER_STAGE = 1.0


def plan_like(
    program: Program, trained_program: Program, trained: Plan, prices: Prices, request: SearchRequest
) -> Plan:
    """A plan of `program`, the same model traced for evaluation, with the stages of `trained`.

    Every layer runs on a device group that holds its parameters by the trained plan; stages follow each other as there.
    Without stages this is `search` for a plan without stages.

    Args:
        program: what is to be planned; its layers may be others than those of `trained_program`.
        trained_program: what `trained` is for.
        trained: the plan that says which device group holds which parameter.
        prices: the prices.
        request: how to search; `training.is_training` is False, and its `schedules` are needed.

    Raises:
        ConstraintError: the layers of `program` don't follow each other as the stages hold their parameters.
    """
    if not trained.stages:
        return search(program, trained.world_size, prices, replace(request, schedules=None))
    cuts = _stage_starts(program, trained_program, trained)
    schedule = simplest_schedule(trained.schedule, trained.num_groups, len(trained.stages))
    demands = (
        f"pipeline={trained.num_groups}",
        f"cuts={','.join(map(str, cuts))}",
        f"schedule={schedule}",
        "microbatches=1",
    )
    plan = search(program, trained.world_size, prices, replace(request, constraints=(*request.constraints, *demands)))
    return replace(plan, constraints=request.constraints)


def _stage_starts(program: Program, trained_program: Program, trained: Plan) -> tuple[int, ...]:
    """The first layers of all stages but the first: dynamic programming over layers and stages."""
    stages = trained.stages
    holders: dict[str, set[int]] = {}
    for index, stage in enumerate(stages):
        for layer in trained_program.layers[stage.start : stage.stop]:
            for name in _held(trained_program, layer):
                holders.setdefault(name, set()).add(index)
    # least[s]: the least price of the layers so far in the stages 0 to s, the last of them in s.
    least = [math.inf] * len(stages)
    came: list[list[int]] = []
    for number, layer in enumerate(program.layers):
        own = [_misplaced(program, layer, index, trained, holders) for index in range(len(stages))]
        before = [(least[index - 1] if index else math.inf, index - 1) for index in range(len(stages))]
        if not number:
            before[0] = (0.0, -1)
        best = [min(stay, step) for stay, step in zip(zip(least, itertools.count()), before, strict=False)]
        least = [value + extra for (value, _), extra in zip(best, own, strict=True)]
        came.append([origin for _, origin in best])
        if all(map(math.isinf, least)):
            raise ConstraintError(_explain(program, layer, holders))
    if math.isinf(least[-1]):
        raise ConstraintError(
            f"the {len(program.layers)} layers for evaluation can't be cut as the {len(stages)} stages for training "
            "are: a stage would have none; train with fewer stages, such as 'pipeline=2'"
        )
    return _first_layers(came, len(stages))


def _first_layers(came: Sequence[Sequence[int]], num_stages: int) -> tuple[int, ...]:
    stage, firsts = num_stages - 1, list[int]()
    for number in range(len(came) - 1, 0, -1):
        origin = came[number][stage]
        if origin != stage:
            firsts.append(number)
        stage = origin
    return tuple(reversed(firsts))


def _held(program: Program, layer: Layer) -> list[str]:
    """Names in the module of the parameters and buffers that a layer reads."""
    return [program.parameters[value] for value in layer.state if value in program.parameters]


def _misplaced(program: Program, layer: Layer, stage: int, trained: Plan, holders: dict[str, set[int]]) -> float:
    """0 if this stage holds all that the layer reads, infinite if its device group doesn't."""
    needed = [holders[name] for name in _held(program, layer) if name in holders]
    if all(stage in stages for stages in needed):
        return 0.0
    group = trained.stages[stage].group
    is_there = all(any(trained.stages[index].group == group for index in stages) for stages in needed)
    return _OTHER_STAGE if is_there else math.inf


def _explain(program: Program, layer: Layer, holders: dict[str, set[int]]) -> str:
    where = "; ".join(
        f"{name} in {', '.join(f'stage {index}' for index in sorted(holders[name]))}"
        for name in _held(program, layer)
        if name in holders
    )
    return (
        f"for evaluation, layer {layer.name!r} needs a stage that holds all it reads and comes no earlier than the "
        f"stages of the layers before it, but there is none ({where}): cut elsewhere with 'cuts=...', so that the "
        "parameters of one layer are in one stage"
    )
