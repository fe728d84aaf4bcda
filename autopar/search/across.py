"""The search across layers: candidates of every layer, then the fastest path that fits.

For every number of microbatches that is exact and every way to store shared parameters there is one chain
of layers (`chain`); all their paths together are the pool from which the fastest that fits is taken, as simulated
(`finals`).  The pool does not depend on the memory limit, so more memory never gives a slower plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ConstraintError
from autopar.plan import Plan
from autopar.program import Program
from autopar.search.considered import considered_paths, considered_pipeline
from autopar.search.constraints import Constraints, demands_on, parse_constraints
from autopar.search.finals import best_final
from autopar.search.flats import FlatSearch
from autopar.search.infeasibility import describe_infeasible
from autopar.search.microbatch import time_assignment
from autopar.search.request import SearchRequest
from autopar.search.stages.constraints import PipelineDemands, pipeline_demands
from autopar.search.stages.settings import PipelineSearch
from autopar.search.stages.solve import Found
from autopar.search.trials import Task, Trial
from autopar.step.prices import Prices

__all__ = ["search"]


def search(program: Program, world_size: int, prices: Prices, request: SearchRequest) -> Plan:
    """The fastest plan for `program` on `world_size` devices that fits and meets the request.

    With `request.schedules`, plans with pipeline stages are considered too.

    Raises:
        ConstraintError: a constraint can't be read, contradicts another, matches nothing or can't be met.
        InfeasibleError: no plan fits; the message names the smallest memory that would do, and what fills it.
        MissingPriceError: an op or collective has no price.
    """
    started = time.perf_counter()
    constraints = parse_constraints(request.constraints, world_size)
    layer_demands = demands_on(program, constraints)
    demands = pipeline_demands(constraints, program, world_size, is_training=request.training.is_training)
    task = Task(program, world_size, prices, request, constraints, layer_demands)
    allowed = prices.memory_bytes if request.memory_limit_bytes is None else request.memory_limit_bytes
    # Beside the caller's batch, which is there whatever the plan.
    batch = request.training.batch_bytes(program)
    limit = allowed / (1 + request.memory_error) - batch
    flats = FlatSearch(task, limit)
    if not demands.needs_pipeline:
        flats.begin()
    found = None
    if _considers_pipelines(request, constraints, demands):
        assert request.schedules is not None
        pipelines = PipelineSearch(
            program, world_size, prices, request, request.schedules, constraints, layer_demands, demands, limit,
            task.settled,
        )  # fmt: skip
        found = pipelines.run(flats.best_s)
        task.notes.extend(pipelines.notes)
    flats.go_on(found.best_s if found else math.inf)
    trials = flats.trials
    _tell(request, trials, found)
    final = best_final(trials, found, limit, batch, request)
    if final is None:
        smallest = found.smallest if found else None
        raise describe_infeasible(trials, allowed, request, task.notes, smallest)
    lower_s = min(trial.paths.lower_bound_s(limit) for trial in trials) if trials else math.inf
    lower_s = min(lower_s, found.lower_s) if found else lower_s
    least_s = min(flats.best_s, found.best_s) if found else flats.best_s
    plan, notes = final.plan, final.notes
    if plan.num_microbatches > 1:
        notes = [*notes, _note_outputs(program), *_note_approximations(program, plan, constraints)]
    return replace(
        plan,
        memory_limit_bytes=float(allowed),
        optimality_gap=max(0.0, least_s / lower_s - 1) if lower_s > 0 else 0.0,
        constraints=request.constraints,
        notes=(*program.notes, *prices.notes, *filter(None, dict.fromkeys(notes))),
        planning_s=(("search", time.perf_counter() - started),),
    )


def _tell(request: SearchRequest, trials: Sequence[Trial], found: Found | None) -> None:
    """Hand out what was looked at, to who asks for it."""
    if request.on_considered is None:
        return
    for trial in trials:
        for path in considered_paths(trial):
            request.on_considered(path)
    for staged in found.simulated if found else ():
        request.on_considered(considered_pipeline(staged))


def _considers_pipelines(request: SearchRequest, constraints: Constraints, demands: PipelineDemands) -> bool:
    if demands.needs_pipeline and request.schedules is None:
        raise ConstraintError("a pipeline is demanded, but this search has no schedules: SearchRequest.schedules")
    # A mesh of all devices leaves none for another group.
    is_whole = constraints.get("mesh") is not None and demands.groups < 2
    return request.schedules is not None and demands.groups != 1 and not is_whole


def _note_approximations(program: Program, plan: Plan, constraints: Constraints) -> tuple[str, ...]:
    """What is not exact in this plan, as the user allowed."""
    found = time_assignment(
        program, plan.num_microbatches, joins_outputs=True, per_microbatch=constraints.per_microbatch
    )
    return () if isinstance(found, str) else found.notes


def _note_outputs(program: Program) -> str:
    """With microbatches only the loss, if there is one, can be differentiated."""
    if not program.loss:
        return ""
    others = ", ".join(dict.fromkeys(name for name in program.outputs if name != program.loss))
    return f"in microbatches only the loss carries gradients; these outputs don't: {others}" if others else ""
