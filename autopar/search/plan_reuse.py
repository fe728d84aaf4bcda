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
from autopar.search.plan_selection import host_shortage
from autopar.search.request import SearchRequest
from autopar.search.search_context import input_rows
from autopar.step.plan_check import check_fit
from autopar.step.prices import Prices
from autopar.step.pricing import predict

__all__ = ["check_known", "reuse_plan"]

# More are as good as never asked for, and every number that is tried costs a check of the whole plan.
_MOST_MICROBATCHES = 64


def reuse_plan(plan: Plan, planned: Program, program: Program, prices: Prices, request: SearchRequest) -> Plan | None:
    """`plan`, made for `planned`, for `program`: the same but for the number of microbatches, and for collectives in
    pieces of rows that don't divide.

    Microbatches are as large as before, or as near to that as is exact and fits.

    Args:
        plan: whose decisions are tried.
        planned: the program that it is for.
        program: another one.
        prices: what `program` is priced with.
        request: how it is trained, and the memory that it may use.

    Returns:
        The plan, None if those decisions can't run `program`, or need more memory than there is.
    """
    ways = itertools.product(_microbatch_counts(plan, planned, program), _schedules(plan), _in_pieces(plan))
    for count, schedule, strategies in ways:
        candidate = plan.with_decisions(
            fingerprint=program.fingerprint,
            num_microbatches=count,
            schedule=schedule,
            strategies=strategies if count > 1 else tuple(map(_in_one, strategies)),
        )
        try:
            check_fit(candidate, program, plan.world_size)
        except PlanMismatchError:
            continue
        candidate = _predicted(candidate, program, prices, request)
        allowed = prices.memory_bytes if request.memory_limit_bytes is None else request.memory_limit_bytes
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


def _microbatch_counts(plan: Plan, planned: Program, program: Program) -> Sequence[int]:
    """Numbers of microbatches to try: of as many rows as before, then those that divide the rows, the closest first."""
    before = plan.num_microbatches
    if before == 1:
        return (1,)
    rows_before, rows = (max(input_rows(each), default=1) for each in (planned, program))
    same_size = before * rows / rows_before
    divisors = (count for count in range(1, min(rows, _MOST_MICROBATCHES) + 1) if rows % count == 0)
    return sorted(divisors, key=lambda count: (abs(math.log(count / same_size)), -count))


def _schedules(plan: Plan) -> Iterable[str]:
    """The plan's own; for fewer microbatches than it needs, one that takes any number."""
    if not plan.stages:
        return (plan.schedule,)
    return dict.fromkeys((plan.schedule, simplest_schedule(plan.schedule, plan.num_groups, len(plan.stages))))


def _in_pieces(plan: Plan) -> Iterable[tuple[LayerStrategy, ...]]:
    """The plan's own strategies; with every collective in one piece, as rows may not divide."""
    return dict.fromkeys((plan.strategies, tuple(replace(each, pieces=()) for each in plan.strategies)))


def _in_one(strategy: LayerStrategy) -> LayerStrategy:
    return replace(strategy, time=())
