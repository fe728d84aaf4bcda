"""The whole search on small models with table prices: promises about the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.errors import ConstraintError, InfeasibleError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, TrainingSpec, infeasibility, search
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.search.search_context import SearchContext
from autopar.search.settings.constraints import demands_on, parse_constraints
from autopar.search.settings.labels import degrees
from autopar.step.layer.boundary_values import boundary_values, transfer_parts_s
from tests.layer_costs import layer_cost
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

SIZES = {"hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2}
PRICES = TablePrices(devices_per_node=2)


@cache
def small_model(num_layers: int = 3, *, tied: bool = False) -> Program:
    return decoder_model(num_layers, 8, 16, 64, tied=tied, **SIZES)


@cache
def run(program: Program, *constraints: str, memory: float | None = None, world: int = 4, **more: int) -> Plan:
    request = SearchRequest(memory, TrainingSpec(), constraints, max_microbatches=more.get("max_microbatches", 2))
    return search(program, world, PRICES, request)


def test_nodes_that_share_a_row_get_an_axis_of_their_own() -> None:
    """Unasked, a search has two axes elsewhere: rows are fewer than nodes here."""
    request, nothing = SearchRequest(), parse_constraints((), 8)
    program = {rows: decoder_model(1, rows, 16, 64, **SIZES) for rows in (2, 8)}
    few, many = (
        SearchContext(each, 8, PRICES, request, nothing, demands_on(each, nothing)) for each in program.values()
    )
    assert {*few.meshes} - {*many.meshes} == {(2, 2, 2)}


def price_again(program: Program, plan: Plan) -> float:
    """The step time from the plan alone: layers, and what crosses between them."""
    found = time_assignment(program, plan.num_microbatches)
    assert isinstance(found, TimeAssignment)
    seconds = 0.0
    chosen = [plan.strategies[planned.strategy] for planned in plan.layers]
    names = {value: name for name, value in program.parameters.items()}
    shared = {names[name]: (plan.shared_mesh, layout) for name, layout in plan.shared_storage}
    first_of_kind = {layer.kind: layer for layer in program.kinds}
    for layer, strategy in zip(program.layers, chosen, strict=True):
        first = first_of_kind[layer.kind]
        seconds += layer_cost(program, first, strategy, plan.num_microbatches, PRICES, TrainingSpec(), shared).total_s
    for c in boundary_values(program, dict(found.factors), plan.num_microbatches):
        source, target = chosen[c.producer], chosen[c.reader]
        seconds += sum(
            transfer_parts_s(
                PRICES,
                c.tensor,
                c.requires_grad,
                plan.num_microbatches,
                (source.mesh, source.outputs[c.output]),
                (target.mesh, target.inputs[c.input]),
            )
        )
    return seconds


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("constraints", [(), ("microbatches=2",), ("mesh=2x2", "zero=3", "recompute=full")])
def test_the_reported_step_time_is_the_price_of_the_plan(constraints: tuple[str, ...]) -> None:
    program = small_model()
    plan = run(program, *constraints)
    assert plan.step_time_s + plan.overlapped_s == pytest.approx(price_again(program, plan), rel=1e-12)
    costs = plan.costs
    assert plan.step_time_s + plan.overlapped_s == pytest.approx(sum(cost.total_s for cost in costs), rel=1e-12)
    assert plan.peak_memory_bytes <= plan.memory_limit_bytes
    assert plan.optimality_gap >= 0


def test_a_plan_survives_its_text() -> None:
    for plan in (run(small_model(), "microbatches=2"), run(small_model(tied=True))):
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_what_does_not_fit_names_the_smallest_memory_and_what_fills_it() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan fits into .* the smallest needs .*parameters .* optimizer"):
        run(small_model(), memory=1000.0)


def test_few_paths_are_walked_to_name_the_smallest_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []
    walk = infeasibility.step_memory
    monkeypatch.setattr(infeasibility, "step_memory", lambda *given: walked.append(1) or walk(*given))
    with pytest.raises(InfeasibleError, match="the smallest needs"):
        run.__wrapped__(small_model(), "microbatches=2", "zero=0", memory=1000.0)
    assert 0 < len(walked) <= 4


@pytest.mark.slow
def test_planning_does_not_solve_equal_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.search.layer import layer_pricing

    solved: list[int] = []
    original = layer_pricing.LayerProblem
    monkeypatch.setattr(layer_pricing, "LayerProblem", lambda *a, **k: solved.append(1) or original(*a, **k))
    run.__wrapped__(small_model(2), "recompute=none", max_microbatches=1)
    few = len(solved)
    solved.clear()
    plan = run.__wrapped__(small_model(12), "recompute=none", max_microbatches=1)
    assert len(solved) == few
    assert len(plan.layers) == 14


def test_tied_parameters_have_one_storage_counted_once() -> None:
    plan = run(small_model(tied=True))
    assert [name for name, _ in plan.shared_storage] == ["embedding.weight"]
    assert len(plan.shared_storage[0][1]) == len(plan.shared_mesh)
    untied = run(small_model())
    assert untied.shared_storage == ()
    assert (
        price_again(small_model(tied=True), plan) < plan.step_time_s + plan.overlapped_s
    )  # the optimizer on the tied parameter


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("wanted", ["data=4", "sequence=4", "tensor=2"])
def test_a_forced_degree_is_what_the_decoder_layers_do(wanted: str) -> None:
    plan = run(small_model(), wanted, "recompute=none", max_microbatches=1)
    name, degree = wanted.split("=")
    strategy = plan.strategies[plan.layers[1].strategy]
    assert degrees(strategy.labels, strategy.mesh)[name] == int(degree)


def test_degrees_combine() -> None:
    plan = run(small_model(), "data=2", "tensor=2", "recompute=none", max_microbatches=1)
    strategy = plan.strategies[plan.layers[1].strategy]
    assert degrees(strategy.labels, strategy.mesh) == {"data": 2, "tensor": 2, "sequence": 1, "context": 1, "expert": 1}


def test_a_degree_that_a_layer_cannot_use_is_noted() -> None:
    plan = run(small_model(), "sequence=4", "recompute=none", max_microbatches=1)
    given_up = [note for note in plan.notes if "can't use" in note]
    kept = all(
        degrees(plan.strategies[layer.strategy].labels, plan.strategies[layer.strategy].mesh)["sequence"] == 4
        for layer in plan.layers
    )
    assert bool(given_up) != kept


@pytest.mark.parametrize(
    ("constraints", "rows"),
    [
        (("data=2",), "batch of 7 rows"),
        (("blocks.1: data=2",), "batch of 7 rows"),
        (("pipeline=2", "data=2"), "batch of 7 rows"),
        (("data=2", "microbatches=7"), "batch of 1 row in each of 7 microbatches"),
    ],
)
def test_a_batch_that_does_not_divide_over_a_data_degree_is_refused(constraints: tuple[str, ...], rows: str) -> None:
    program = decoder_model(3, 7, 16, 64, **SIZES)
    with pytest.raises(ConstraintError, match=rf"data=2.*{rows}.*multiple of"):
        search(program, 4, PRICES, SearchRequest(constraints=constraints, schedules=schedule_actions))


def test_a_caller_with_batches_of_any_size_may_leave_one_whole() -> None:
    request = SearchRequest(constraints=("data=2",), max_microbatches=1, any_batch=True)
    plan = search(decoder_model(3, 7, 16, 64, **SIZES), 4, PRICES, request)
    assert sum("can't use data=2" in note for note in plan.notes) == 3


def test_a_pipeline_has_no_more_microbatches_than_a_data_degree_leaves_rows_for() -> None:
    program = decoder_model(3, 2, 16, 64, **SIZES)
    request = SearchRequest(constraints=("pipeline=2", "data=2"), schedules=schedule_actions)
    plan = search(program, 4, PRICES, request)
    assert plan.num_microbatches == 1
    assert all(degrees(s.labels, s.mesh)["data"] == 2 for s in plan.strategies)


def test_settings_hold_where_they_are_asked_for() -> None:
    plan = run(small_model(), "blocks.*: recompute=full", "blocks.1: zero=3", "mesh=2x2", max_microbatches=1)
    chosen = {layer.name: plan.strategies[layer.strategy] for layer in plan.layers}
    assert all(strategy.mesh == (2, 2) for strategy in chosen.values())
    assert all(chosen[name].recompute == "full" for name in ("blocks.0", "blocks.1", "blocks.2"))
    assert chosen["blocks.1"].zero == 3


def test_replicate_leaves_parameters_whole() -> None:
    program = small_model()
    plan = run(program, "head: replicate", "zero=3", "recompute=none", max_microbatches=1)
    strategy = plan.strategies[plan.layers[-1].strategy]
    assert all(not placement.is_shard for layout in strategy.storage for placement in layout)


def test_a_number_of_microbatches_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConstraintError, match="microbatches=3"):
        run(small_model(), "microbatches=3")


def test_one_device_gets_a_plan() -> None:
    plan = run(small_model(), world=1, max_microbatches=1)
    assert plan.strategies[0].mesh == (1,)
    assert all(cost.activation_comm_s == 0 for cost in plan.costs)


def test_the_table_of_a_plan_shows_what_each_axis_does() -> None:
    plan = run(small_model(), "data=2", "tensor=2", "recompute=none", max_microbatches=1)
    text = str(replace(plan, notes=("something to know",)))
    # The first line is one line, however long.
    assert all(len(line) <= 80 and line.isascii() for line in text.splitlines()[1:])
    how = " ".join(line.split("|")[2].strip() for line in text.splitlines() if line.startswith("|"))
    assert "2 data x 2 tensor" in how or "2 tensor x 2 data" in how
    assert "note: something to know" in text
    assert "predicted step time" in text
