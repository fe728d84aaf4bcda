"""The search for a plan by the user's arguments, and the notes and predictions that are added to its result."""

from __future__ import annotations

from dataclasses import replace

from autopar.host.garbage import collected_seldom
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.length_plans import FamilyPlanner
from autopar.planning.logits import search_plan
from autopar.planning.precision import with_speedup
from autopar.planning.setup import Setup
from autopar.program import Program
from autopar.search import MEMORY_ERROR, SearchRequest, search
from autopar.step.variants.planned_program import as_decided
from autopar.user_text.progress import phase

__all__ = ["find_plan", "finish", "request_of", "search_setup", "with_trace_s"]


def search_setup(program: Program, world_size: int, setup: Setup, request: SearchRequest | None = None) -> Plan:
    """The fastest plan that fits, by the prices of `setup`; `request` is `request_of` it, unless more is asked for.

    Raises:
        InfeasibleError: nothing fits.
    """
    request = request or request_of(setup)
    return finish(find_plan(program, world_size, setup, request), program, setup, request)


@collected_seldom()
def find_plan(
    program: Program, world_size: int, setup: Setup, request: SearchRequest, *, seeks_gap: bool = True
) -> Plan:
    """The plan that the search returns, with the seconds of each phase.

    Raises:
        InfeasibleError: nothing fits.
    """
    with phase(f"searching for a plan for {world_size} devices"):
        plan = _search(program, world_size, setup, request, seeks_gap=seeks_gap)
    return with_trace_s(plan, setup)


def _search(program: Program, world_size: int, setup: Setup, request: SearchRequest, *, seeks_gap: bool = True) -> Plan:
    prices = setup.prices
    assert prices is not None
    return search_plan(
        setup.compile, lambda own, given: search(own, world_size, prices, given), program, prices, request, world_size,
        seeks_gap=seeks_gap,
    )  # fmt: skip


def with_trace_s(plan: Plan, setup: Setup) -> Plan:
    """`plan` with the seconds of tracing, which came before its search."""
    return replace(plan, planning_s=(("trace", setup.trace_s), *plan.planning_s))


def finish(plan: Plan, program: Program, setup: Setup, request: SearchRequest) -> Plan:
    """`plan` of `program` with the speedup of another precision, and its family for other lengths."""
    prices = setup.prices
    assert prices is not None
    if setup.dtype is None:
        plan = with_speedup(plan, as_decided(program, plan.decisions), prices, setup.training)
    if setup.lengths is None or setup.trace_rows is None:
        return plan
    planner = FamilyPlanner(
        setup.lengths, setup.trace_rows, lambda own: _search(own, plan.world_size, setup, request), prices, request,
        setup.time_layers,
    )  # fmt: skip
    return planner.family(plan, program)


def request_of(setup: Setup) -> SearchRequest:
    """The request of the search."""
    return SearchRequest(
        setup.memory_bytes, setup.training, setup.constraints, schedules=schedule_actions, memory_error=MEMORY_ERROR
    )
