"""The pipeline benchmark on few steps: what runs can't be faster than its timeline, and its closed forms hold."""

from __future__ import annotations

import pytest

from autopar.schedules import schedule_names
from autopar.schedules.action_lists import StageCost, simulate_schedule
from benchmarks.pipeline import Case, Outcome, run_cases
from tests.ranks import run_ranks
from tests.vocabulary.test_schedule import bubble_fraction

UNIT_S = 0.02
CASES = [Case(schedule, 2, 4, "sleep", is_even) for schedule in schedule_names() for is_even in (True, False)]


def times_of(case: Case, unit_s: float) -> tuple[StageCost, ...]:
    return tuple(StageCost(load * unit_s, 2 * load * unit_s, load * unit_s) for load in case.loads)


@pytest.mark.parametrize("num_groups", [2, 4, 8])
@pytest.mark.parametrize("schedule", schedule_names())
def test_the_closed_forms_are_those_of_the_timeline(schedule: str, num_groups: int):
    case = Case(schedule, num_groups, 2 * num_groups, "sleep", is_even=True)
    timeline = simulate_schedule(case.actions, times_of(case, 1.0))
    assert bubble_fraction(timeline) == pytest.approx(case.closed_form)


def test_a_schedule_without_actions_says_why():
    assert not Case("dualpipev", 2, 4, "sleep", is_even=True).problem
    assert "at least as many microbatches" in Case("dualpipev", 2, 2, "sleep", is_even=True).problem


@pytest.mark.slow
def test_sleeping_stages_are_never_faster_than_the_timeline():
    # Only this side: a busy machine wakes sleepers late.  Transfers count as nothing, for so does their measurement.
    found: list[list[list[Outcome]]] = run_ranks(run_cases, 2, CASES, 1, UNIT_S)
    for case, (outcome,) in zip(CASES, found[0], strict=True):
        least_s = simulate_schedule(case.actions, times_of(case, UNIT_S)).step_s
        assert least_s <= outcome.measured_s, case
        assert least_s <= outcome.predicted_s, case
