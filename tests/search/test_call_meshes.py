"""Calls whose rows don't divide over the plan's data axis are planned on its mesh, with that axis in two."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, plan_like, search
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

PRICES = TablePrices(devices_per_node=2)


def request(*constraints: str) -> SearchRequest:
    """Nothing here depends on microbatches."""
    return SearchRequest(constraints=constraints, max_microbatches=1)


@cache
def decoder(rows: int) -> Program:
    return decoder_model(2, rows, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)


@cache
def trained(*constraints: str) -> Plan:
    return search(decoder(8), 8, PRICES, request(*constraints))


def planned(rows: int, *constraints: str, by: Plan) -> Plan:
    return plan_like(decoder(rows), decoder(8), by, PRICES, request(*constraints))


def meshes(plan: Plan) -> set[tuple[int, ...]]:
    return {strategy.mesh for strategy in plan.strategies}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("rows", "mesh"), [(4, (4, 2)), (2, (2, 4)), (6, (2, 4))])
def test_half_the_rows_get_half_the_data_axis(rows: int, mesh: tuple[int, ...]) -> None:
    plan = planned(rows, by=trained("mesh=8", "data=8"))
    assert meshes(plan) == {mesh}
    assert not plan.constraints


def test_the_axis_inside_of_data_gets_longer() -> None:
    assert meshes(planned(2, by=trained("mesh=4x2", "data=4", "tensor=2"))) == {(2, 4)}


def test_what_is_demanded_is_not_replaced() -> None:
    assert meshes(planned(4, "mesh=2x4", by=trained("mesh=8", "data=8"))) == {(2, 4)}


@pytest.mark.slow
def test_rows_that_divide_are_searched_for_on_all_meshes() -> None:
    assert planned(8, by=trained("mesh=8", "data=8")).decisions == trained().decisions
