"""The search for a plan by what a user asked, and what is added to a plan that was found."""

from __future__ import annotations

from dataclasses import replace

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.length_plans import FamilyPlanner
from autopar.planning.logits import search_plan
from autopar.planning.precision import with_speedup
from autopar.planning.setup import Setup
from autopar.program import Program
from autopar.progress import phase
from autopar.search import MEMORY_ERROR, SearchRequest, search
from autopar.step.variants import as_decided

__all__ = ["finish", "request_of", "search_setup"]


def search_setup(program: Program, world_size: int, setup: Setup) -> Plan:
    """The fastest plan that fits, by the prices of `setup`.

    Raises:
        InfeasibleError: nothing fits.
    """
    with phase(f"searching for a plan for {world_size} devices"):
        found = _search(program, world_size, setup)
    return finish(found, program, setup)


def _search(program: Program, world_size: int, setup: Setup) -> Plan:
    prices = setup.prices
    assert prices is not None
    return search_plan(
        setup.compile, lambda own, asked: search(own, world_size, prices, asked), program, prices, request_of(setup),
        world_size,
    )  # fmt: skip


def finish(found: Plan, program: Program, setup: Setup) -> Plan:
    """`found` with what took how long, what another precision would bring, and its family for other lengths."""
    prices = setup.prices
    assert prices is not None
    found = replace(found, planning_s=(("trace", setup.trace_s), *found.planning_s))
    if setup.dtype is None:
        found = with_speedup(found, as_decided(program, found.decisions), prices, setup.training)
    if setup.lengths is None or setup.trace_rows is None:
        return found
    planner = FamilyPlanner(
        setup.lengths, setup.trace_rows, lambda own: _search(own, found.world_size, setup), prices, request_of(setup),
        setup.time_layers,
    )  # fmt: skip
    return planner.family(found, program)


def request_of(setup: Setup) -> SearchRequest:
    """What the search is asked for."""
    return SearchRequest(
        setup.memory_bytes, setup.training, setup.constraints, schedules=schedule_actions, memory_error=MEMORY_ERROR
    )
