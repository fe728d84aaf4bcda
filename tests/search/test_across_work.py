"""How much work a search does, counted: time on a shared machine says little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from autopar.search import SearchRequest, TrainingSpec, search
from autopar.search.chain import chain_dp, single_stage
from autopar.search.layer import layer_pricing
from autopar.step.costs import layer_cost
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices

COUNTED = (
    (layer_pricing, "LayerProblem"),
    (layer_pricing, "solve_problem"),
    (layer_pricing, "running_costs"),
    (layer_pricing, "storage_cost"),
    (layer_cost, "placed_cost"),
    (single_stage, "fastest_paths"),
    (chain_dp, "_shortest"),
)


@pytest.fixture
def count_work(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Counter[str]]:
    """Search a model of so many decoder layers on 4 devices: how often each of `COUNTED` ran."""
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **keywords)

        return call

    for module, name in COUNTED:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))

    def count(num_layers: int) -> Counter[str]:
        calls.clear()
        program = decoder_model(num_layers, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
        request = SearchRequest(None, TrainingSpec(), (), max_microbatches=2)
        search(program, 4, TablePrices(devices_per_node=2), request)
        return Counter(calls)

    return count


def test_a_problem_is_built_and_solved_once_for_all_its_uses(
    count_work: Callable[[int], Counter[str]],
) -> None:
    work = count_work(3)
    # Memory is no limit here, so two microbatches are not tried; paths are looked for by what is visible of them by
    # estimate, by their sums, and by what they take at least, which the printed gap needs.
    assert work["fastest_paths"] == 3
    kinds, meshes, variants = 3, 2, 3
    assert work["LayerProblem"] == kinds * meshes
    assert work["solve_problem"] == kinds * meshes * variants
    # Each strategy is priced once for all ways to recompute and to store it.
    assert work["placed_cost"] <= 20 * kinds  # those of the plans that are simulated
    assert work["running_costs"] <= 220
    assert work["storage_cost"] <= 180
    # A sweep is one run of dynamic programming: no value of this program skips a layer at a cost.
    assert work["_shortest"] <= 320


@pytest.mark.slow
def test_work_does_not_grow_with_depth(count_work: Callable[[int], Counter[str]]) -> None:
    shallow, deep = count_work(3), count_work(24)
    for name in ("LayerProblem", "solve_problem", "fastest_paths"):
        assert shallow[name] == deep[name]
    assert deep["running_costs"] <= 1.2 * shallow["running_costs"]
    assert deep["_shortest"] <= 2 * shallow["_shortest"]
