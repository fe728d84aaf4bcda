"""What a search says of its own optimum: the gap that it prints, and when it searches again."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import HostMemoryError, InfeasibleError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.search import SearchRequest, plan_search, search, search_context
from autopar.search.pipeline.pipeline_search import PipelineSearch
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

PRICES = TablePrices(devices_per_node=2)
PROGRAM = decoder_model(4, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
PIPELINES = SearchRequest(
    constraints=("pipeline=2", "schedule=1f1b"), max_microbatches=4, schedules=schedule_actions, memory_limit_bytes=4e5
)


def refuse_first(monkeypatch: pytest.MonkeyPatch, error: type[InfeasibleError]) -> list[float]:
    """The first choice of a plan fails so; the limits that pipelines are then searched with."""
    limits: list[float] = []
    select, run = plan_search.select_plan, PipelineSearch.run

    def refuse(*arguments: Any) -> Any:
        if len(limits) == 1:
            raise error("no plan fits")
        return select(*arguments)

    def note(self: PipelineSearch, known_s: float) -> Any:
        limits.append(self.limit_bytes)
        return run(self, known_s)

    monkeypatch.setattr(plan_search, "select_plan", refuse)
    monkeypatch.setattr(PipelineSearch, "run", note)
    return limits


def test_a_second_search_with_less_memory_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = search(PROGRAM, 4, PRICES, PIPELINES)
    limits = refuse_first(monkeypatch, InfeasibleError)
    second = search(PROGRAM, 4, PRICES, PIPELINES)
    assert limits[1] < limits[0]
    first_s, second_s = (plan.step_time_s + plan.overlapped_s for plan in (first, second))
    assert second_s > first_s, "less memory costs nothing here, so this test shows nothing"
    assert (1 + second.optimality_gap) / (1 + first.optimality_gap) == pytest.approx(second_s / first_s)


def test_less_memory_is_no_help_to_hosts_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = refuse_first(monkeypatch, HostMemoryError)
    with pytest.raises(HostMemoryError):
        search(PROGRAM, 4, PRICES, PIPELINES)
    assert len(limits) == 1


def test_whole_layers_are_priced_once_for_device_groups_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []
    place_whole = search_context.place_whole

    def count(program: Any, layer: Any) -> Any:
        placed.append(layer.kind)
        return place_whole(program, layer)

    monkeypatch.setattr(search_context, "place_whole", count)
    search(PROGRAM, 4, PRICES, SearchRequest(max_microbatches=4, schedules=schedule_actions))
    assert sorted(placed) == list(range(len(PROGRAM.kinds)))
