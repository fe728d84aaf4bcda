"""A plan for other calls of a trained model whose stages are those of its plan, so that no parameter moves."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.errors import ConstraintError, InfeasibleError
from autopar.placement import refine_mesh
from autopar.plan import Plan
from autopar.program import Layer, Program
from autopar.schedules import simplest_schedule
from autopar.search.plan_search import search
from autopar.search.settings.constraints import DEGREES, spell_out
from autopar.search.settings.request import SearchRequest
from autopar.step.prices import Prices

__all__ = ["plan_like", "stage_constraints", "stages_of"]

# The price of a layer in another stage than the one that held its parameters, on a device group that has them: any
# positive number, as misplaced layers are counted.
_OTHER_STAGE = 1.0
_MICROBATCHES = re.compile(r"\s*microbatches\s*=")
_PIPELINE = re.compile(r"\s*(pipeline|stages|cuts|schedule)\s*=")


def plan_like(
    program: Program, trained_program: Program, trained: Plan, prices: Prices, request: SearchRequest
) -> Plan:
    """A plan of `program`, the same model in eval mode or on other inputs, with the stages of `trained`.

    Every layer runs on a device group that holds its parameters by the trained plan; stages follow each other as there.
    Without stages this is `search` for a plan without stages.  A batch that can't be split as constraints demand is
    not: the plan's notes say so.

    Where the rows don't divide over the data axis of `trained`, a plan on its mesh is sought first, with that axis in
    two: this takes half the time, as one mesh is looked at in place of all (`_near_mesh`).

    Args:
        program: what is to be planned; its layers may be others than those of `trained_program`.
        trained_program: what `trained` is for.
        trained: the plan that says which device group holds which parameter.
        prices: the prices.
        request: how to search; its `schedules` are needed.

    Raises:
        ConstraintError: the layers of `program` don't follow each other as the stages hold their parameters.
        InfeasibleError: nothing fits.
    """
    demands = _stage_demands(program, trained_program, trained, request) if trained.stages else ()
    kept = tuple(text for text in request.constraints if not (trained.stages and _PIPELINE.match(text)))
    without = replace(request, any_batch=True, schedules=request.schedules if trained.stages else None)

    def search_with(constraints: tuple[str, ...], mesh: tuple[str, ...] = ()) -> Plan:
        own = replace(without, constraints=(*constraints, *mesh, *demands))
        return replace(search(program, trained.world_size, prices, own), constraints=constraints)

    demanded = {part.rpartition(":")[2].partition("=")[0].strip() for text in kept for part in spell_out(text)}
    near = _near_mesh(program, trained) if demanded.isdisjoint((*DEGREES, "mesh")) else ()
    if near:
        with suppress(ConstraintError, InfeasibleError):
            return search_with(kept, (f"mesh={'x'.join(map(str, near))}",))
    # Fewer and fewer constraints: the number of microbatches is what a batch of another size meets least often.
    attempts = [kept, tuple(text for text in kept if not _MICROBATCHES.match(text)), ()]
    problems: list[ConstraintError] = []
    for constraints in dict.fromkeys(attempts):
        try:
            plan = search_with(constraints)
        except ConstraintError as error:
            problems.append(error)
            continue
        if not problems:
            return plan
        left = tuple(text for text in kept if text not in constraints)
        note = f"without the constraints {', '.join(left)} for these inputs: {problems[-1]}"
        return replace(plan, notes=(*plan.notes, note))
    raise problems[-1]


def _near_mesh(program: Program, trained: Plan) -> tuple[int, ...]:
    """The mesh of the usual layers of `trained`, with its data axis in two so that the rows of `program` divide over
    the outer part; the inner part joins the axis inside of it.

    () where rows divide anyway or not at all, and where a layer would get an axis more than it had besides data: then
    other meshes may be much better.
    """
    usual, _ = Counter(layer.strategy for layer in trained.layers).most_common(1)[0]
    strategy = trained.strategies[usual]
    data = [axis for axis, label in enumerate(strategy.labels) if label == "data" and strategy.mesh[axis] > 1]
    if len(data) != 1:
        return ()
    before, size, behind = strategy.mesh[: data[0]], strategy.mesh[data[0]], strategy.mesh[data[0] + 1 :]
    outer = math.gcd(size, program.batch_size)
    if outer in (1, size) or (before and not behind):
        return ()
    inner = size // outer * (behind[0] if behind else 1)
    mesh = (*before, outer, inner, *behind[1:])
    try:
        refine_mesh(mesh, *(each.mesh for each in trained.strategies))  # parameters have to get from there to here
    except ValueError:
        return ()
    return mesh


def _stage_demands(
    program: Program, trained_program: Program, trained: Plan, request: SearchRequest
) -> tuple[str, ...]:
    """The constraints that give a plan the stages of `trained`."""
    is_training = request.training.is_training
    has_loss = bool(program.loss) or not is_training
    schedule = simplest_schedule(trained.schedule, trained.num_groups, len(trained.stages), has_loss=has_loss)
    return (
        *stage_constraints(program, trained_program, trained),
        f"schedule={schedule}",
        *(() if is_training else ("microbatches=1",)),
    )


def stage_constraints(program: Program, trained_program: Program, trained: Plan) -> tuple[str, ...]:
    """The constraints by which each stage of a plan of `program` is on the device group that holds its parameters by
    `trained`, a plan of `trained_program` with stages.

    Raises:
        ConstraintError: the layers of `program` don't follow each other as the stages hold their parameters.
    """
    cuts = _stage_starts(program, trained_program, trained)
    return f"pipeline={trained.num_groups}", f"cuts={','.join(map(str, cuts))}"


def stages_of(program: Program, plan: Plan) -> dict[str, frozenset[int]]:
    """The stages of `plan` whose layers read a parameter or buffer, by its name in the module; empty without stages."""
    stages: dict[str, frozenset[int]] = {}
    for index, stage in enumerate(plan.stages):
        for layer in program.layers[stage.start : stage.stop]:
            for name in _state_names(program, layer):
                stages[name] = stages.get(name, frozenset()) | {index}
    return stages


def _stage_starts(program: Program, trained_program: Program, trained: Plan) -> tuple[int, ...]:
    """The first layers of all stages but the first: dynamic programming over layers and stages."""
    stages = trained.stages
    holders = stages_of(trained_program, trained)
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
        most = len(program.layers)
        fewer = f"with fewer stages, at most {most} here, or " if most > 1 else ""
        raise ConstraintError(
            f"the {most} layers of this call can't be cut as the {len(stages)} stages of the plan are: a stage would "
            f"have none; plan {fewer}without stages ('pipeline=1')"
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


def _state_names(program: Program, layer: Layer) -> list[str]:
    """Names in the module of the parameters and buffers that a layer reads."""
    return [program.parameters[value] for value in layer.state if value in program.parameters]


def _misplaced(
    program: Program, layer: Layer, stage: int, trained: Plan, holders: Mapping[str, frozenset[int]]
) -> float:
    """0 if this stage holds all that the layer reads, infinite if its device group doesn't."""
    needed = [holders[name] for name in _state_names(program, layer) if name in holders]
    if all(stage in stages for stages in needed):
        return 0.0
    group = trained.stages[stage].group
    is_there = all(any(trained.stages[index].group == group for index in stages) for stages in needed)
    return _OTHER_STAGE if is_there else math.inf


def _explain(program: Program, layer: Layer, holders: Mapping[str, frozenset[int]]) -> str:
    where = "; ".join(
        f"{name} in {', '.join(f'stage {index}' for index in sorted(holders[name]))}"
        for name in _state_names(program, layer)
        if name in holders
    )
    return (
        f"in this call, layer {layer.name!r} needs a stage that holds all it reads and comes no earlier than the "
        f"stages of the layers before it, but there is none ({where}): cut elsewhere with 'cuts=...', so that the "
        "parameters of one layer are in one stage"
    )
