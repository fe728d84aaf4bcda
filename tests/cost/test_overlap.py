import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.schedules.action_lists import StageCost, simulate_schedule
from benchmarks.published.overlap import both_s, exposed_s, gathered_ahead_s, pipeline_s

SECONDS = st.floats(0, 100)
TAKEN = st.floats(0, 0.9)


@given(SECONDS, SECONDS, TAKEN)
def test_together_is_never_faster_than_each_nor_slower_than_one_after_the_other(compute_s, communication_s, taken):
    both = both_s(compute_s, communication_s, taken)
    assert max(compute_s, communication_s) <= both <= (compute_s + communication_s) * (1 + 1e-12)
    assert exposed_s(compute_s, communication_s, taken) == both - compute_s


@given(SECONDS, TAKEN)
def test_more_communication_never_takes_less(compute_s, taken):
    seconds = [both_s(compute_s, communication_s, taken) for communication_s in range(0, 200, 5)]
    assert seconds == sorted(seconds)


def test_a_chain_waits_for_its_first_gather_only():
    assert gathered_ahead_s([(3.0, 1.0)] * 4, 0.0) == 13.0
    assert gathered_ahead_s([(1.0, 3.0)] * 4, 0.0) == 13.0
    assert gathered_ahead_s([], 0.2) == 0.0


@pytest.mark.parametrize(("num_groups", "num_microbatches"), [(2, 4), (4, 8), (4, 4), (8, 32)])
def test_the_closed_form_is_what_1f1b_takes(num_groups, num_microbatches):
    actions = schedule_actions("1f1b", num_groups, num_groups, num_microbatches)
    timeline = simulate_schedule(actions, (StageCost(1.0, 2.0),) * num_groups)
    assert pipeline_s([3.0] * num_groups, num_microbatches) == pytest.approx(timeline.step_s)


@pytest.mark.parametrize(("num_groups", "num_rounds", "num_microbatches"), [(2, 2, 4), (4, 2, 8), (4, 5, 32)])
def test_the_closed_form_is_near_what_interleaved_1f1b_takes(num_groups, num_rounds, num_microbatches):
    actions = schedule_actions("interleaved_1f1b", num_groups, num_groups * num_rounds, num_microbatches)
    timeline = simulate_schedule(actions, (StageCost(1.0, 2.0),) * (num_groups * num_rounds))
    expected_s = pipeline_s([3.0 * num_rounds] * num_groups, num_microbatches, num_rounds)
    assert expected_s == pytest.approx(timeline.step_s, rel=0.05)


def test_the_slowest_group_sets_the_pace():
    assert pipeline_s([1.0, 2.0, 1.0], 10) == 22.0
