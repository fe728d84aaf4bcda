"""The search: candidates of every layer, the fastest paths through all of them, pipelines, and the choice of a plan.

For every number of microbatches that is exact and every way to store shared parameters there is one candidate set.
`single_stage` looks for paths through all layers, `pipeline` for stages; `plan_selection` takes the fastest plan that
fits, as simulated.  The paths without stages do not depend on the memory limit, so more memory never gives a slower
plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autopar.errors import ConstraintError, HostMemoryError, InfeasibleError
from autopar.host.garbage import collected_seldom
from autopar.plan import Plan
from autopar.program import Program
from autopar.search.chain.single_stage import SingleStagePaths, SingleStageSearch
from autopar.search.considered_plans import describe_paths, describe_pipeline
from autopar.search.infeasibility import describe_infeasible
from autopar.search.pipeline.pipeline_candidates import PipelineResults
from autopar.search.pipeline.pipeline_constraints import PipelineDemands, pipeline_demands
from autopar.search.pipeline.pipeline_search import PipelineSearch
from autopar.search.plan_selection import (
    STAGES_GAIN,
    enough_s,
    preferred_s,
    replaced_by_stages_s,
    select_plan,
    simulated_s,
)
from autopar.search.search_context import SearchContext
from autopar.search.settings.constraints import HOST_STORAGE, Constraints, LayerDemands, demands_on, parse_constraints
from autopar.search.settings.degree_roles import stack_sizes
from autopar.search.settings.request import NoMatchError, SearchRequest
from autopar.search.settings.space_splits import can_add_space, check_images, with_space
from autopar.step.prices import Prices
from autopar.step.training import TrainingSpec

__all__ = ["search"]

# Of the limit, for a second search if all pipelines of the first fit as the search counts, but not as the walk through
# the step does: that finds up to 5 % more.
_LESS = 0.93
# A plan without stages that takes so many times as long as compute alone leaves much for pipelines, which are searched
# first then: their best rules out larger numbers of microbatches without stages.  Else it is the other way round.
_FAR = 2.0
# If stages won an earlier search of the same planning, with layers compiled or logits in pieces, and plans without
# stages took so many times as long as the plan to beat, those of eager layers or whole logits are not searched: they
# compute no faster.  They may need less memory, but eager plans were found to be 2 to 7 % slower where memory is short.
_HOPELESS = 1.05


@collected_seldom()
def search(program: Program, world_size: int, prices: Prices, request: SearchRequest) -> Plan:
    """The fastest plan for `program` on `world_size` devices that fits and meets the request.

    With `request.schedules`, plans with pipeline stages are considered too.  Splits of images in space are considered
    if the batch does not divide over the devices, a constraint demands them, or nothing else fits.

    Raises:
        ConstraintError: a constraint can't be read, contradicts another, matches nothing or can't be met.
        InfeasibleError: no plan fits; the message names the smallest memory that would do, and what fills it.
        NoMatchError: what may fit is no faster than `request.rival_s`, and was passed over.
        MissingPriceError: an op or collective has no price.
    """
    try:
        return _search(program, world_size, prices, request)
    except (HostMemoryError, NoMatchError):
        raise
    except InfeasibleError:
        if not can_add_space(program, world_size, request.constraints):
            raise
    return _search(program, world_size, prices, request, adds_space=True)


def _search(
    program: Program, world_size: int, prices: Prices, request: SearchRequest, *, adds_space: bool = False
) -> Plan:
    """`search`; with `adds_space`, splits in space are considered even if the batch divides over the devices."""
    started = time.perf_counter()
    constraints = parse_constraints(request.constraints, world_size)
    request = replace(request, training=_training_by(constraints, request.training))
    layer_demands = with_space(program, demands_on(program, constraints), world_size, even_if_divides=adds_space)
    if not request.any_batch:
        check_images(program, layer_demands)
    _check_host(layer_demands, prices, request.training)
    _check_experts(program, layer_demands, constraints, request)
    demands = pipeline_demands(constraints, program, world_size, is_training=request.training.is_training)
    context = SearchContext(program, world_size, prices, request, constraints, layer_demands)
    allowed = prices.memory_bytes if request.memory_limit_bytes is None else request.memory_limit_bytes
    # The caller's batch is there whatever the plan.
    batch = request.training.batch_bytes(program)
    limit = allowed / (1 + request.memory_error) - batch
    single_stage = SingleStageSearch(context, limit)
    pipelines = _search_all(context, demands, single_stage, limit, batch)
    _report_considered(request, single_stage.searched, pipelines)
    bounded = pipelines
    try:
        selected = select_plan(single_stage.searched, pipelines, limit, batch, request)
    except HostMemoryError:
        raise  # less of the device's memory would offload no less
    except InfeasibleError:
        if pipelines is None:
            raise
        pipelines = _search_pipelines(context, demands, _LESS * limit)
        selected = select_plan(single_stage.searched, pipelines, limit, batch, request)
    if selected is None and single_stage.is_outdone:
        raise NoMatchError(f"no plan was found that takes less than {request.rival_s:.4g} s a step")
    if selected is None:
        smallest = pipelines.smallest if pipelines else None
        raise describe_infeasible(single_stage.searched, allowed, request, context.notes, smallest)
    plan, notes = selected
    if bounded is not None and pipelines is not None:
        bounded.bound_up_to(pipelines.largest_bytes)
    gap, compute_gap = math.inf, partial(_optimality_gap, single_stage, bounded, plan, request)
    if request.gaps is None:
        gap = compute_gap()
    else:
        request.gaps.defer(plan.decisions, compute_gap)
    notes = [*notes, _note_gradients(plan), _note_host_update(plan)]
    if plan.num_microbatches > 1:
        notes = [*notes, _note_outputs(program), *_note_approximations(context, plan)]
    return replace(
        plan,
        memory_limit_bytes=float(allowed),
        optimality_gap=gap,
        constraints=request.constraints,
        notes=(*program.notes, *prices.notes, *filter(None, dict.fromkeys(notes))),
        planning_s=(("search", time.perf_counter() - started),),
    )


def _search_all(
    context: SearchContext, demands: PipelineDemands, single_stage: SingleStageSearch, limit: float, batch: float
) -> PipelineResults | None:
    """Search plans without stages, and pipelines if they are considered, the more promising of both first.

    Args:
        context: of the search.
        demands: on pipelines.
        single_stage: begins and goes on here, unless a pipeline is demanded.
        limit: of memory in bytes, without the batch.
        batch: bytes of the caller's batch.
    """
    request = context.request

    def flat_s() -> float:
        return simulated_s(single_stage.searched, limit, batch, request.rival_s)

    pipelines: PipelineResults | None = None
    pending = _considers_pipelines(request, context.constraints, demands)
    if not demands.needs_pipeline and not (pending and _is_flat_hopeless(context)):
        single_stage.begin()
        if pending and flat_s() > _FAR * context.ideal_s:
            pipelines, pending = _search_pipelines(context, demands, limit, enough_s(flat_s(), request)), False
        single_stage.go_on(lambda: min(flat_s(), STAGES_GAIN * pipelines.best_s if pipelines else math.inf))
    if pending:
        best_s = flat_s()
        single_stage.remember_least(best_s if best_s < request.rival_s else math.inf)
        pipelines = _search_pipelines(context, demands, limit, enough_s(best_s, request))
    if single_stage.searched and pipelines is not None and pipelines.best is not None:
        request.known.flat_s = flat_s() if STAGES_GAIN * pipelines.best_s < flat_s() else 0.0
    return pipelines


def _is_flat_hopeless(context: SearchContext) -> bool:
    """Whether plans without stages were so slow in an earlier search that they are not worth another one."""
    known = context.request.known
    frees_memory = context.program.piece_tokens > known.piece_tokens
    return not frees_memory and known.flat_s > _HOPELESS * context.request.rival_s


def _training_by(constraints: Constraints, training: TrainingSpec) -> TrainingSpec:
    """`training` as constraints demand it."""
    return replace(
        training,
        gradient_dtype=str(constraints.get("gradients") or training.gradient_dtype),
        host_storage=bool(constraints.get(HOST_STORAGE)) or training.host_storage,
    )


def _check_host(demands: Sequence[LayerDemands], prices: Prices, training: TrainingSpec) -> None:
    offloads = any(each.offload == "activations" for each in demands)
    if (offloads or training.host_storage) and not prices.host.bytes_per_s:
        what = "optimizer" if training.host_storage else "activations"
        raise ConstraintError(
            f"offload={what} needs a link to the host's memory, and none is known of {prices.device!r}: describe "
            "it, such as Device(..., host_bytes_per_s=50e9, host_memory_bytes=250e9)"
        )


def _check_experts(
    program: Program, demands: Sequence[LayerDemands], constraints: Constraints, request: SearchRequest
) -> None:
    if request.stored:
        return  # other calls may leave the experts out
    demanded = {
        index: degree
        for index, each in enumerate(demands)
        for name, degree in each.degrees
        if name == "expert" and degree > 1
    }
    sizes = {layer.kind: stack_sizes(program, layer) for layer in program.kinds}
    if demanded and not any(sizes.values()):
        raise ConstraintError(
            f"expert={next(iter(demanded.values()))}: this model has no stack of experts that devices can share. "
            'Experts of Hugging Face\'s models have one after model.set_experts_implementation("grouped_mm")'
        )
    of_patterns = {each.value for each in constraints.scoped if each.key == "expert"} - {constraints.get("expert")}
    for degree in dict.fromkeys(demanded.values()):
        demanding = [program.layers[index] for index, each in demanded.items() if each == degree]
        with_stacks = [layer for layer in demanding if sizes[layer.kind]]
        counts = {size for layer in with_stacks for size in sizes[layer.kind]}
        if not counts and degree in of_patterns:
            where = ", ".join(layer.name for layer in program.layers if sizes[layer.kind])
            raise ConstraintError(
                f"expert={degree}: no layer that the pattern matches has experts; those that have some are {where:.200}"
            )
        if counts and all(size % degree for size in counts):
            num_experts, first = max(counts), with_stacks[0].name
            possible = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
            raise ConstraintError(
                f"expert={degree}: the {num_experts} experts of {first} do not divide over {degree} devices: "
                f"choose one of {possible}"
            )


def _search_pipelines(
    context: SearchContext,
    demands: PipelineDemands,
    limit_bytes: float,
    enough_s: float = math.inf,
) -> PipelineResults:
    """Those that may be faster than this; what is to be said of them is added to the context's notes."""
    assert context.request.schedules is not None
    pipeline_search = PipelineSearch(context, context.request.schedules, demands, limit_bytes)
    pipelines = pipeline_search.run(enough_s)
    context.notes.extend(pipeline_search.notes)
    return pipelines


def _optimality_gap(
    single_stage: SingleStageSearch, pipelines: PipelineResults | None, plan: Plan, request: SearchRequest
) -> float:
    """By how much `plan` is slower than a bound on all plans that fit and were looked at, both as simulated, relative.

    Pipelines are bounded as closely as that matters: one must be faster than a plan without stages by more than
    predictions are off.  The gap of a plan that is slower than a rival is not sought that closely.
    """
    lower_s = single_stage.lower_bound_s()
    if pipelines is not None:
        enough_s = min(lower_s / STAGES_GAIN, replaced_by_stages_s(plan))
        if preferred_s(plan) < request.rival_s:
            pipelines.raise_bounds(enough_s)
        lower_s = min(lower_s, STAGES_GAIN * pipelines.lower_bound_s)
    return max(0.0, preferred_s(plan) / lower_s - 1) if lower_s > 0 else 0.0


def _report_considered(
    request: SearchRequest, searched: Sequence[SingleStagePaths], pipelines: PipelineResults | None
) -> None:
    """Tell who asks for it what was looked at."""
    if request.on_considered is None:
        return
    for paths in searched:
        for path in describe_paths(paths):
            request.on_considered(path)
    for pipeline in pipelines.candidates if pipelines else ():
        request.on_considered(describe_pipeline(pipeline))


def _considers_pipelines(request: SearchRequest, constraints: Constraints, demands: PipelineDemands) -> bool:
    if demands.needs_pipeline and request.schedules is None:
        raise ConstraintError("a pipeline is demanded, but this search has no schedules: SearchRequest.schedules")
    # A mesh of all devices leaves none for another group.
    is_whole = constraints.get("mesh") is not None and demands.groups < 2
    return request.schedules is not None and demands.groups != 1 and not is_whole


def _note_approximations(context: SearchContext, plan: Plan) -> tuple[str, ...]:
    """What is not exact in this plan, as the user allowed."""
    assignment = context.time_assignment(plan.num_microbatches)
    return () if isinstance(assignment, str) else assignment.notes


def _note_gradients(plan: Plan) -> str:
    """What it means that gradients are added up and reduced in a narrow dtype."""
    if plan.decisions.gradients != "bfloat16":
        return ""
    return (
        "gradients are added up over microbatches and reduced over devices in bfloat16: each of these sums rounds to "
        "8 bits (by up to 0.2 %), in float32 to 24; losses are as exact as without"
    )


def _note_host_update(plan: Plan) -> str:
    """How to make an optimizer that runs on the host; the ratio is of `benchmarks/measured/h100-steps.json`."""
    if not plan.decisions.host_storage:
        return ""
    return (
        "the optimizer updates parameters in the host's memory: make it with fused=True where it has that argument, as "
        "torch.optim.AdamW(model.parameters(), fused=True) (a step on an H100 was 4.3 times as fast with it)"
    )


def _note_outputs(program: Program) -> str:
    """What a caller should know who makes a loss of several outputs."""
    late = {each.place for each in program.late}
    names = (name for place, name in enumerate(program.outputs) if place not in late and name != program.loss)
    others = ", ".join(dict.fromkeys(name for name in names if program.values[name].requires_grad))
    if not program.loss or not others:
        return ""
    return (
        f"backward runs inside the forward call, from {program.loss} alone. If your loss reads other outputs as well "
        f"({others}), the first step runs twice, and further ones by a plan whose backward begins with your loss"
    )
