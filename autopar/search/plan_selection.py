"""The last choice of a search: which plan is fastest when steps are simulated.

A search minimizes seconds less what is overlapped by estimate (`costs.overlap_estimate`); what compute really
overlaps is only seen when a step is simulated.  Of the paths without stages, all are simulated that may turn out
fastest: those that no other beats in memory and seconds, by estimate or with all overlapped that may be, and the same
with equal layers in other orders.  Which ones these are does not depend on the memory limit, so more memory never gives
a slower plan.  Which pipelines a search looks at does depend on it; of them those are simulated that may turn out
fastest, up to a few, the least seconds first.

Stages ask more of the caller's code (microbatches, a backward inside the call), so nobody gets them for a gain that may
not be there: a pipeline must be faster than what runs without stages by more than predictions are off (`STAGES_GAIN`).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from autopar.errors import HostMemoryError, InfeasibleError
from autopar.plan import Plan
from autopar.schedules import Shape
from autopar.search.chain.single_stage import SingleStagePaths
from autopar.search.considered_plans import describe_plan
from autopar.search.final_candidates import MemoryFilter, PlanCandidate, host_shortage, with_stages
from autopar.search.pipeline.pipeline_candidates import PipelineResults
from autopar.search.pipeline.schedule_estimates import is_small
from autopar.search.settings.request import SearchRequest

__all__ = [
    "STAGES_GAIN",
    "enough_s",
    "preferred_s",
    "replaced_by_stages_s",
    "select_plan",
    "simulated_s",
]

# Pipelines that are simulated, small ones and others: sums rank them well but for what is overlapped, and each takes
# about 0.02 s, or up to a second.  12 small ones are enough; `refinement` adds up to 7 others,
# which are to displace none.
_SMALL_PIPELINES = 12 + 7
_LARGE_PIPELINES = 2
# The mean error of predicted steps on published rows held out (6.2 %, docs/accuracy.md).
STAGES_GAIN = 1.06
_WORTH_A_NOTE = 0.005  # of the step: less is nothing to anyone
# Simulated seconds of a plan without stages are at least this fraction of the estimated ones: of 2,400 paths of
# decoders of 8B, 70B and 405B parameters and a mixture of experts the smallest was 0.903.
_LOW = 0.9
# A path that takes so many times as long as the best plan is not simulated in other orders of its equal layers: these
# gained up to 0.9 % (32 layers of 8 experts on 64 devices; 61 of 256 experts on 2048 gained up to 0.2 %, where 560 of
# 1,140 simulations were such).
_REORDERED = 1.02
_FLAT_TRIED = 8  # plans without stages that are simulated to know what pipelines have to beat
# Prices may be off by so much: a caller that times layers wants to time those of pipelines that seem slower, too.
_PRICE_ERROR = 1.15


def select_plan(
    searched: Iterable[SingleStagePaths],
    pipelines: PipelineResults | None,
    limit_bytes: float,
    batch_bytes: float,
    request: SearchRequest,
) -> tuple[Plan, Sequence[str]] | None:
    """The fastest plan that fits with the notes on its search, or None if none does; limit, gap and constraints are the
    caller's to fill in.

    What a search counts as memory is all that a device holds at some moment of the step, which is more than it holds at
    any one moment; where the walk through the step finds more all the same, a plan doesn't fit, and a pipeline is made
    smaller.  Of plans that don't fit as they are counted, a few are walked through, of pipelines only small ones: so
    what fits is mostly found as well if the limit is its own peak.  `limit_bytes` leaves out the batch, of
    `batch_bytes`, which the walk counts.

    Raises:
        HostMemoryError: what fits on devices offloads more than their hosts have room for.
        InfeasibleError: there are pipelines only, and they fit as the search counts, but not as the walk does.
    """
    best: Plan | None = None
    fastest: Plan | None = None
    notes: Sequence[str] = ()
    refused: list[PlanCandidate] = []
    shortages: list[str] = []  # of the hosts' memory
    staged: list[PlanCandidate] = []  # with stages, simulated, and fitting
    memory = MemoryFilter(tuple(searched), limit_bytes, batch_bytes)
    queue = sorted([*memory.without_stages, *with_stages(pipelines)], key=_rank)
    while queue:
        request.check_time()
        candidate = queue.pop(0)
        if not _may_be_best(candidate, best, staged, memory, request):
            continue
        if best is not None and request.on_final is None and candidate.is_slower(preferred_s(best)):
            if not candidate.is_slower(_REORDERED * preferred_s(best)):
                queue[:0] = candidate.reordered
            continue
        queue[:0] = candidate.reordered
        plan, short = candidate.simulate(), candidate.misfit(limit_bytes + batch_bytes)
        if short is not None:
            shortages.append(short)
            refused.append(candidate)
            if smaller := candidate.shrunk(limit_bytes + batch_bytes):
                bisect.insort(queue, smaller, key=_rank)
            continue
        is_new = candidate.shape is None or candidate.setting not in {each.setting for each in staged}
        if candidate.shape is not None:
            staged.append(candidate)
        is_best = best is None or _order(plan) < _order(best)
        _tell(plan, request, is_other=is_new or is_best)
        fastest = min(fastest or plan, plan, key=lambda each: each.step_time_s)
        if is_best:
            best, notes = plan, candidate.context.notes
    if best is not None:
        _note_largest(pipelines, staged)
        return best, [*notes, _note_stages(best, fastest or best)]
    _refuse(shortages or _host_shortages(pipelines), refused, memory, 1 + request.memory_error)
    return None


def _tell(plan: Plan, request: SearchRequest, *, is_other: bool) -> None:
    """Tell who asks for it what was simulated.  Who times layers does so of other plans only: pipelines of one setting
    have nearly the same layers.
    """
    if request.on_final is not None and is_other:
        request.on_final(plan)
    if request.on_considered is not None:
        request.on_considered(describe_plan(plan))


def simulated_s(
    searched: Iterable[SingleStagePaths], limit_bytes: float, batch_bytes: float, rival_s: float = math.inf
) -> float:
    """Seconds of a fast plan without stages that fits, as simulated; at most those of a rival."""
    best_s, tried = rival_s, 0
    memory = MemoryFilter(tuple(searched), limit_bytes, batch_bytes)
    for candidate in sorted(memory.without_stages, key=_rank):
        if tried == _FLAT_TRIED or _rank(candidate) >= best_s:
            break
        if not memory.may_fit(candidate):
            continue
        if candidate.misfit(limit_bytes + batch_bytes) is None:
            best_s, tried = min(best_s, candidate.simulate().step_time_s), tried + 1
    return best_s


def enough_s(flat_s: float, request: SearchRequest) -> float:
    """The step time from which on a pipeline can't replace a plan without stages of `flat_s`, both as simulated."""
    return flat_s * _PRICE_ERROR if request.on_final else flat_s / STAGES_GAIN


def _rank(candidate: PlanCandidate) -> float:
    """Seconds by which candidates are tried in order: those of a pipeline by estimate, others what they take at least.

    What takes less at least than the best plan has to be simulated in any order.  In this one nothing else is.
    """
    return candidate.visible_s if candidate.shape is not None else max(candidate.least_s, _LOW * candidate.visible_s)


def preferred_s(plan: Plan) -> float:
    """The seconds that plans are compared by: those of a pipeline are increased by the error of predictions."""
    return plan.step_time_s * (STAGES_GAIN if plan.stages else 1.0)


def replaced_by_stages_s(plan: Plan) -> float:
    """The step time below which a pipeline is chosen instead of the plan, both as simulated."""
    return preferred_s(plan) / STAGES_GAIN


def _may_be_best(
    candidate: PlanCandidate,
    best: Plan | None,
    staged: Sequence[PlanCandidate],
    memory: MemoryFilter,
    request: SearchRequest,
) -> bool:
    """Whether it may fit and replace `best`, after the pipelines that were simulated before it."""
    if best is not None and (not _is_hopeful(candidate, best, request) or _is_late(candidate.shape, len(staged))):
        return False
    return memory.may_fit(candidate)


def _is_hopeful(candidate: PlanCandidate, best: Plan, request: SearchRequest) -> bool:
    """Whether it may be faster, also than a rival.  Stages are looked at whatever their gain, so that a note can say
    it.
    """
    if candidate.shape is None:
        return _rank(candidate) <= min(_order(best)[0], request.rival_s)
    return candidate.least_s <= (_PRICE_ERROR if request.on_final else 1.0) * min(best.step_time_s, request.rival_s)


def _order(plan: Plan) -> tuple[float, float]:
    """Fastest first, of equals the smallest."""
    return preferred_s(plan), plan.peak_memory_bytes


def _note_stages(plan: Plan, fastest: Plan) -> str:
    """A note on how much faster pipeline stages are predicted to be, where they were not chosen."""
    gain = 1 - fastest.step_time_s / plan.step_time_s if plan.step_time_s else 0.0  # views alone take no time
    if plan.stages or gain < _WORTH_A_NOTE:
        return ""
    return (
        f"pipeline stages would be {gain:.1%} faster by prediction, which is within the error of predictions; "
        f"pipeline={fastest.num_groups} forces them"
    )


def _note_largest(pipelines: PipelineResults | None, fitting: Sequence[PlanCandidate]) -> None:
    if pipelines is not None:
        pipelines.largest_bytes = max((each.counted_bytes for each in fitting), default=0.0)


def _host_shortages(pipelines: PipelineResults | None) -> Sequence[str]:
    """The message for the pipeline that offloads least of those that fit on devices, but not on hosts, if any does."""
    short = pipelines and pipelines.short_of_host
    return (
        (host_shortage(PlanCandidate.of_pipeline(short).simulate(), short.candidates.context.prices),) if short else ()
    )


def _is_late(shape: Shape | None, num_simulated: int) -> bool:
    """Whether enough pipelines were simulated."""
    if shape is None:
        return False
    return num_simulated >= (_SMALL_PIPELINES if is_small(shape) else _LARGE_PIPELINES)


def _refuse(shortages: Sequence[str], refused: Sequence[PlanCandidate], memory: MemoryFilter, error: float) -> None:
    """Raise the reason why no simulated plan fits: too little host memory, or peaks of pipelines that are too large
    though they fit as they are counted.
    """
    for short in filter(None, shortages):
        raise HostMemoryError(f"no plan fits: {short}")
    too_large = [each.walked_bytes for each in refused if each.counted_bytes <= memory.limit_bytes]
    if too_large and not any(each.counted_bytes <= memory.limit_bytes for each in memory.without_stages):
        allowed_bytes = memory.limit_bytes + memory.batch_bytes
        raise InfeasibleError(
            f"no plan fits into {allowed_bytes * error / 2**30:.6g} GiB per device: the smallest pipeline that was "
            f"simulated needs {min(too_large) * error / 2**30:.6g} GiB, and would run out of memory. Use more devices "
            "or microbatches, or allow more memory"
        )
