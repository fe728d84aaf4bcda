"""The first real steps: compared with the plan."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from autopar import api
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.errors import InfeasibleError
from autopar.lower import ParallelModule
from autopar.lower.autograd import run_backward
from autopar.lower.observe.first_steps import FirstSteps, StepComparison
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.planning.arguments import training_spec
from autopar.search import SearchRequest, search
from autopar.step.simulation.simulate import simulate_step
from autopar.trace import Traced
from autopar.verify.rehearsal import loss_of, run_ranks
from tests.models import make_plain_gpt

GIB = 2**30


@pytest.fixture(scope="module")
def planned() -> tuple[Traced, Plan]:
    model, inputs = make_plain_gpt()
    traced = api.trace_model(model, inputs)
    return traced, search(traced.program, 2, _prices(), SearchRequest(8e9, constraints=("data=2", "zero=1")))


def _prices() -> ClusterPrices:
    return ClusterPrices(Cluster.of("cpu", devices_per_node=2), None)


def test_the_second_and_third_step_are_compared(planned: tuple[Traced, Plan], caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = make_plain_gpt()

    def train(parallel: ParallelModule) -> StepComparison | None:
        for step in range(4):
            assert parallel.observed is None
            if step == 0:
                with torch.no_grad():
                    parallel(**inputs)  # no training call: counting begins behind it
            run_backward(loss_of(parallel(**inputs)))
        return parallel.observed

    with caplog.at_level(logging.INFO, logger="autopar"):
        results = run_ranks(model, planned[0], planned[1], train)
    assert all(seen is not None and seen.measured_s > 0 and seen.measured_bytes == 0 for seen in results)
    assert [record.message.startswith("step: ") for record in caplog.records if record.name == "autopar"] == [True]


def test_above_the_error_bar_it_says_what_to_do() -> None:
    fine = StepComparison(1.0, 1.5, 0.0, 100.0 * GIB, 105.1 * GIB, 0.05)  # libraries keep a tenth of a GiB
    large = StepComparison(1.0, 1.5, 0.0, 100.0 * GIB, 105.2 * GIB, 0.05)
    small = StepComparison(1.0, 1.5, 0.0, 0.015 * GIB, 0.093 * GIB, 0.05)
    assert [fine.is_large, large.is_large, small.is_large] == [False, True, False]
    assert "memory=" in str(large)
    assert "\n" not in str(fine)


def test_a_plan_must_fit_with_its_error(planned: tuple[Traced, Plan]) -> None:
    traced, plan = planned
    constraints = ("data=2", "zero=1", "microbatches=1", "recompute=none")
    request = SearchRequest(8e9, constraints=constraints, memory_error=0.1)
    assert ", within 10%" in str(search(traced.program, 2, _prices(), request))
    tight = replace(request, memory_limit_bytes=1.05 * plan.peak_memory_bytes)
    assert search(traced.program, 2, _prices(), replace(tight, memory_error=0.0)).peak_memory_bytes > 0
    with pytest.raises(InfeasibleError):
        search(traced.program, 2, _prices(), tight)


@pytest.mark.parametrize(
    "constraints", [("data=2", "zero=3"), ("pipeline=2", "schedule=zbv", "microbatches=4")], ids=str
)
def test_memory_over_time_peaks_where_the_plan_says(constraints: tuple[str, ...]) -> None:
    model, inputs = make_plain_gpt(layers=4)
    traced, training = api.trace_model(model, inputs), training_spec(model, "adamw")
    plan = search(traced.program, 2, _prices(), SearchRequest(8e9, training, constraints, schedules=schedule_actions))
    timeline = simulate_step(traced.program, plan, _prices(), training, schedule_actions, overhead_bytes=7.0)
    assert len(timeline.memory) == plan.num_groups
    peaks = [timeline.peak(group).total_bytes for group in range(plan.num_groups)]
    assert max(peaks) == pytest.approx(plan.peak_memory_bytes + 7.0)
    assert timeline.memory_limit_bytes == 8e9 + 7.0
    for points in timeline.memory:
        times = [point.time_s for point in points]
        assert times == sorted(times)
        assert times[-1] == timeline.step_s
        assert min(min(point.num_bytes) for point in points) > -1e-6
        saved = [point.num_bytes[3] for point in points]
        batch = training.batch_bytes(traced.program)
        assert saved[0] == saved[-1] == batch < max(saved)


def test_timing_begins_anew_behind_other_calls(planned: tuple[Traced, Plan]) -> None:
    steps = FirstSteps(planned[1], 0, torch.device("cpu"))
    for _ in range(3):
        steps.begin_step()
    steps.interrupt()
    for _ in range(3):
        steps.begin_step()
    assert steps.seen is None
    steps.begin_step()
    assert steps.seen is not None
