"""The first real steps: compared with the plan, kept in the profile, used by the next plan."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar import api
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.cost.observed import MEMORY_ERROR, corrections, step_key
from autopar.cost.profile import ObservedStep
from autopar.errors import InfeasibleError, InputShapeError
from autopar.lower import ParallelModule
from autopar.lower.compat import AllocationEvent, record_allocations, run_backward
from autopar.lower.observe.allocation_watch import peak_of_events
from autopar.lower.observe.first_steps import FirstSteps, StepComparison
from autopar.lower.run.schedules import schedule_actions
from autopar.plan import Plan
from autopar.planning.arguments import training_spec
from autopar.search import SearchRequest, search
from autopar.step.simulate import simulate_step
from autopar.trace import Traced
from autopar.verify.rehearsal import loss_of, run_ranks
from tests.end_to_end.harness import launch, parallelize
from tests.models import make_flat, make_plain_gpt


@pytest.fixture(scope="module")
def planned() -> tuple[Traced, Plan]:
    model, inputs = make_plain_gpt()
    traced = api.trace_model(model, inputs)
    return traced, search(traced.program, 2, _prices(), SearchRequest(8e9, constraints=("data=2", "zero=1")))


def _prices() -> ClusterPrices:
    return ClusterPrices(Cluster.of("cpu", devices_per_node=2), None)


def test_the_second_and_third_step_are_compared(planned: tuple[Traced, Plan], caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = make_plain_gpt()

    def train(parallel: ParallelModule) -> tuple[bool, StepComparison | None]:
        found: list[StepComparison] = []
        parallel.on_observed(found.append)
        for step in range(4):
            assert parallel.observed is None
            if step == 0:
                with torch.no_grad():
                    parallel(**inputs)  # no training call: counting begins behind it
            run_backward(loss_of(parallel(**inputs)))
        return found == [parallel.observed], parallel.observed

    with caplog.at_level(logging.INFO, logger="autopar"):
        results = run_ranks(model, planned[0], planned[1], inputs, train)
    assert [is_told for is_told, _ in results] == [True, False]  # rank 0 alone is told, all know
    assert all(seen is not None and seen.measured_s > 0 and seen.measured_bytes == 0 for _, seen in results)
    assert [record.message.startswith("step: ") for record in caplog.records if record.name == "autopar"] == [True]


def test_outside_the_error_bar_it_says_what_to_do() -> None:
    fine = StepComparison(1.0, 1.04, 0.0, 100.0, 104.0, 0.05, 0.05)
    off = StepComparison(1.0, 1.06, 0.0, 100.0, 106.0, 0.05, 0.05)
    assert [fine.is_slow, fine.is_large] == [False, False]
    assert off.is_slow
    assert off.is_large
    assert "python -m autopar.profile" in str(off)
    assert "memory=" in str(off)
    assert "\n" not in str(fine)


def test_a_seen_peak_scales_the_next_prediction(planned: tuple[Traced, Plan]) -> None:
    traced, plan = planned
    profile = Profile("cpu", 2, "", {}, {})
    assert corrections(profile, "f").memory_error == MEMORY_ERROR
    larger = profile.with_steps({step_key("f", "a"): ObservedStep(1.0, 1.2, 100.0, 150.0)})
    known = corrections(larger, "f")
    assert (known.memory_factor, known.step_time_error) == (1.5, pytest.approx(0.2))
    request = SearchRequest(8e9, constraints=("data=2", "zero=1"), memory_factor=1.5, memory_error=0.1)
    scaled = search(traced.program, 2, _prices(), request)
    assert scaled.peak_memory_bytes == pytest.approx(1.5 * plan.peak_memory_bytes)
    assert scaled.memory_error == 0.1
    assert "+- 10 %" in str(scaled)
    with pytest.raises(InfeasibleError):  # it would fit, but not with its error
        search(traced.program, 2, _prices(), SearchRequest(plan.peak_memory_bytes, request.training,
               ("data=2", "zero=1", "microbatches=1", "recompute=none"), memory_error=0.1))  # fmt: skip


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


def test_a_watch_begins_anew_behind_other_calls(planned: tuple[Traced, Plan]) -> None:
    watch = FirstSteps(planned[1], 0, torch.device("cpu"))
    for _ in range(3):
        watch.begin_step()
    watch.interrupt()
    for _ in range(4):  # the fourth is watched: known when the next one begins
        watch.begin_step()
    assert watch.seen is None
    watch.begin_step()
    assert watch.seen is not None


def test_a_watched_step_ends_where_the_optimizer_has_stepped() -> None:
    model, inputs = make_flat(batch=8192)  # what kernels take for themselves is small beside it
    traced, training = api.trace_model(model, inputs), training_spec(model, "adamw").on_device(_prices().device)
    plan = search(traced.program, 1, _prices(), SearchRequest(8e9, training))

    def train(parallel: ParallelModule) -> tuple[bool, StepComparison | None]:
        optimizer = torch.optim.AdamW(parallel.parameters())
        for _ in range(3):
            _train(parallel, optimizer, inputs)
        run_backward(loss_of(parallel(**inputs)))
        was_watched = record_allocations() is None
        optimizer.step()
        return was_watched, parallel.observed

    [(was_watched, seen)] = run_ranks(model, traced, plan, inputs, train)
    assert was_watched
    assert seen is not None
    assert seen.measured_bytes == pytest.approx(plan.peak_memory_bytes, rel=0.01)


def test_a_failing_step_leaves_no_profiler(planned: tuple[Traced, Plan]) -> None:
    model, inputs = make_plain_gpt()
    plan = search(planned[0].program, 1, _prices(), SearchRequest(8e9))

    def train(parallel: ParallelModule) -> tuple[bool, str]:
        optimizer = torch.optim.AdamW(parallel.parameters())
        for _ in range(3):
            _train(parallel, optimizer, inputs)
        with pytest.raises(InputShapeError):
            parallel(**(inputs | {"targets": inputs["targets"][:3]}))
        end = record_allocations()
        is_free = end is not None and end() is not None
        with torch.profiler.profile() as own:
            for _ in range(4):
                _train(parallel, optimizer, inputs)
        assert any(event.name == "aten::addmm" for event in own.events() or ())
        return is_free, parallel.observed.memory_note if parallel.observed else ""

    assert run_ranks(model, planned[0], plan, inputs, train) == [(True, "another profiler was running")]


def test_what_went_unseen_is_not_counted_twice() -> None:
    events = [
        AllocationEvent(1, 7, 50),
        AllocationEvent(3, 7, 60),
        AllocationEvent(4, 9, -30),
        AllocationEvent(5, 8, 9),
    ]
    gone = [AllocationEvent(2, 0, -40)]
    assert peak_of_events(100, events, []) == 169
    assert peak_of_events(100, events, gone) == 150  # 100 + 50; then 60 + 60 + 9


def _train(parallel: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> None:
    optimizer.zero_grad()
    run_backward(loss_of(parallel(**inputs)))
    optimizer.step()


def check_next_plan(folder: str, constraints: tuple[str, ...], *, is_compiled: bool) -> None:
    """A plan for another optimizer says too little; the real step says so, and the next plan says more."""
    api._CACHE = Path(folder) / "cache"
    model, inputs = make_plain_gpt(layers=4)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("autopar").addHandler(handler)
    planned = partial(parallelize, model, inputs, constraints=constraints, profile=None, compile=is_compiled)
    right = planned(optimizer="adamw").plan.peak_memory_bytes
    parallel = planned(optimizer="sgd")
    first = parallel.plan.peak_memory_bytes
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(5):
        _train(parallel, optimizer, inputs)
    seen = parallel.observed
    assert seen is not None
    ratio = seen.measured_bytes / seen.predicted_bytes
    assert seen.is_large
    assert ratio > 1.05
    if not is_compiled:  # a compiler saves less than the plan counts
        most = torch.tensor(seen.measured_bytes, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert most.item() == pytest.approx(right, rel=0.1)
    dist.barrier()
    if dist.get_rank() == 0:
        assert any("The peak is above" in line for line in said)
        [path] = api._CACHE.glob("*.json")
        [step] = Profile.load(path).steps.values()
        assert step.measured_bytes / step.predicted_bytes == pytest.approx(ratio)
    again = planned(optimizer="sgd")
    if dist.get_rank() == 0:
        assert again.plan.peak_memory_bytes == pytest.approx(first * ratio)


@pytest.mark.slow
def test_a_real_step_above_its_prediction_raises_the_next(tmp_path: Path) -> None:
    pipeline = ("pipeline=2", "schedule=1f1b", "microbatches=2", "recompute=none")
    flat = ("data=2", "zero=1", "microbatches=1", "recompute=none")
    launch(
        2,
        partial(check_next_plan, str(tmp_path / "flat"), flat, is_compiled=False),
        partial(check_next_plan, str(tmp_path / "pipeline"), pipeline, is_compiled=False),
        partial(check_next_plan, str(tmp_path / "compiled"), flat, is_compiled=True),
    )
