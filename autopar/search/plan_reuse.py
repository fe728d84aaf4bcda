"""The decisions of a plan for another program of the same layers: the model on inputs of other shapes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from autopar.errors import InfeasibleError, MissingPriceError, PlanMismatchError
from autopar.plan import LayerStrategy, Plan
from autopar.plan.prediction import Prediction
from autopar.program import Program
from autopar.schedules import simplest_schedule
from autopar.search.final_candidates import host_shortage
from autopar.search.microbatches.time_assignment import time_assignment
from autopar.search.settings.request import SearchRequest
from autopar.step.plan_check import check_fit
from autopar.step.prices import Prices
from autopar.step.pricing import predict

__all__ = ["check_known", "reuse_plan"]

# More are hardly ever used, and every number that is tried costs a check of the whole plan.
_MOST_MICROBATCHES = 64


def reuse_plan(plan: Plan, planned_rows: int, program: Program, prices: Prices, request: SearchRequest) -> Plan | None:
    """`plan`, made for a batch of `planned_rows`, for `program`: the same but for the number of microbatches, and for
    collectives in pieces of rows that don't divide.

    Microbatches are as large as before, or as near to that as is exact and fits; a plan without microbatches needs none
    for more rows as long as these fit into memory (`RowCost.at_once`).

    Args:
        plan: whose decisions are tried.
        planned_rows: of the batch that it is for.
        program: another one.
        prices: what `program` is priced with.
        request: how it is trained, and the memory that it may use.

    Returns:
        The plan, None if those decisions can't run `program`, or need more memory than there is.
    """
    allowed = prices.memory_bytes if request.memory_limit_bytes is None else request.memory_limit_bytes
    counts = _microbatch_counts(plan, planned_rows, program, allowed / (1 + request.memory_error))
    for count, schedule, strategies in itertools.product(counts, _schedules(plan, program), _in_pieces(plan)):
        candidate = plan.with_decisions(
            fingerprint=program.fingerprint,
            num_microbatches=count,
            schedule=schedule,
            strategies=strategies if count > 1 else tuple(map(_in_one, strategies)),
        )
        if count > 1 == plan.num_microbatches:
            cut = _in_several(candidate, program)
            if cut is None:
                continue
            candidate = cut
        try:
            check_fit(candidate, program, plan.world_size)
        except PlanMismatchError:
            continue
        candidate = _predicted(candidate, program, prices, request)
        is_small = candidate.peak_memory_bytes * (1 + request.memory_error) <= allowed
        if is_small and not host_shortage(candidate, prices):
            return replace(candidate, planning_s=(), optimality_gap=float("inf"))
    return None


def check_known(plan: Plan, program: Program, prices: Prices, request: SearchRequest) -> Plan:
    """`plan`, of a file, with what is predicted of it.

    Raises:
        PlanMismatchError: it can't run `program`.
        InfeasibleError: it offloads more than hosts have room for.
    """
    check_fit(plan, program, plan.world_size)
    known = _predicted(plan, program, prices, request)
    short = host_shortage(known, prices)
    if short:
        raise InfeasibleError(f"the plan does not fit: {short}")
    return known


def _predicted(plan: Plan, program: Program, prices: Prices, request: SearchRequest) -> Plan:
    with suppress(MissingPriceError):
        prediction = predict(program, plan.decisions, prices, request.training, request.schedules)
        return replace(plan, prediction=prediction)
    return replace(plan, prediction=Prediction())


def _microbatch_counts(plan: Plan, planned_rows: int, program: Program, limit_bytes: float) -> Sequence[int]:
    """Numbers of microbatches to try: of as many rows as before, then those that divide the rows, the closest first.

    A plan without microbatches first tries to stay so, unless it is predicted not to fit.
    """
    before, rows, row = plan.num_microbatches, program.batch_size, plan.prediction.row
    if before == 1 and rows <= planned_rows:
        return (1,)
    same_size = before * rows / planned_rows
    divisors = (count for count in range(1, min(rows, _MOST_MICROBATCHES) + 1) if rows % count == 0)
    closest = sorted(divisors, key=lambda count: (abs(math.log(count / same_size)), -count))
    if before > 1:
        return closest
    own = rows // row.ranks
    first = (1,) if row.at_once(own, limit_bytes) == own else ()
    return tuple(dict.fromkeys((*first, *(count for count in closest if rows % (count * row.ranks) == 0))))


def _schedules(plan: Plan, program: Program) -> Iterable[str]:
    """The plan's own; for fewer microbatches than it needs, or a loss that comes later, one that takes these."""
    if not plan.stages:
        return (plan.schedule,)
    has_loss = program.has_loss_in_layers or not program.training
    simplest = simplest_schedule(plan.schedule, plan.num_groups, len(plan.stages), has_loss=has_loss)
    return dict.fromkeys((plan.schedule, simplest))


def _in_pieces(plan: Plan) -> Iterable[tuple[LayerStrategy, ...]]:
    """The plan's own strategies; with every collective in one piece, as rows may not divide."""
    return dict.fromkeys((plan.strategies, tuple(replace(each, pieces=()) for each in plan.strategies)))


def _in_one(strategy: LayerStrategy) -> LayerStrategy:
    return replace(strategy, time=())


def _in_several(plan: Plan, program: Program) -> Plan | None:
    """`plan`, whose strategies are those of one microbatch, with the factors that its microbatches split; None where
    that would not be exact.
    """
    assignment = time_assignment(program, plan.num_microbatches)
    if isinstance(assignment, str) or len(plan.layers) != len(program.layers):
        return None
    pairs = [(layer.strategy, assignment.factors[own.kind]) for layer, own in
             zip(plan.layers, program.layers, strict=True)]  # fmt: skip
    known = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    return plan.with_decisions(
        strategies=tuple(replace(plan.strategies[strategy], time=time) for strategy, time in known),
        layers=tuple(replace(layer, strategy=known[pair]) for layer, pair in zip(plan.layers, pairs, strict=True)),
    )
