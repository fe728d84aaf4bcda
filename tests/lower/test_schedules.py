"""The action lists that torch's schedules give."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter

import pytest

from autopar.lower.run import schedule_lists
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.schedules import find_schedule, schedule_names, schedule_problem, stage_group
from autopar.schedules.action_lists import Action, ScheduleActions

ROUNDS = {name: 1 if name in ("gpipe", "1f1b") else 2 for name in schedule_names()}


def written(actions: ScheduleActions) -> list[str]:
    return [" ".join(map(str, group)) for group in actions]


def test_lists_of_few_microbatches_read_as_in_the_papers():
    assert written(schedule_actions("gpipe", 2, 2, 2)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ]
    assert written(schedule_actions("1f1b", 2, 2, 3)) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


@pytest.mark.parametrize("num_microbatches", [1, 4, 8, 9])
@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_stage_does_everything_once(schedule: str, num_groups: int, num_microbatches: int):
    num_stages = num_groups * ROUNDS[schedule]
    if schedule_problem(schedule, num_groups, num_stages, num_microbatches):
        with pytest.raises(ValueError, match=schedule):
            schedule_actions(schedule, num_groups, num_stages, num_microbatches)
        return
    actions = schedule_actions(schedule, num_groups, num_stages, num_microbatches)
    counts = Counter((action.stage, action.kind) for group in actions for action in group)
    assert len({action for group in actions for action in group}) == counts.total()
    for stage in range(num_stages):
        (group,) = (g for g, listed in enumerate(actions) if any(action.stage == stage for action in listed))
        assert group == stage_group(schedule, stage, num_groups)
        assert counts[stage, "F"] == num_microbatches
        assert counts[stage, "B"] + counts[stage, "I"] == num_microbatches
        assert counts[stage, "W"] == counts[stage, "I"]
        is_sent = stage + 1 < num_stages and group != stage_group(schedule, stage + 1, num_groups)
        crossing = num_microbatches if is_sent else 0
        assert counts[stage, "SEND_F"] == counts[stage, "RECV_B"] == crossing
        assert counts[stage + 1, "RECV_F"] == counts[stage + 1, "SEND_B"] == crossing


def messages(actions: ScheduleActions, schedule: str, group: int, peer: int) -> list[str]:
    """What `group` sends to `peer` and receives from it, each written as its SEND."""
    found: list[str] = []
    for action in actions[group]:
        if action.kind in "FBIW":
            continue
        way, direction = action.kind.split("_")
        step = 1 if direction == "F" else -1
        source = action.stage if way == "SEND" else action.stage - step
        ends = {stage_group(schedule, stage, len(actions)) for stage in (source, source + step)}
        if ends == {group, peer}:
            found.append(str(Action(source, f"SEND_{direction}", action.microbatch)))
    return found


@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("schedule", schedule_names())
def test_two_groups_list_the_messages_between_them_in_one_order(schedule: str, num_groups: int):
    # messages are told apart by their order alone, and NCCL runs those of both directions one after the other
    actions = schedule_actions(schedule, num_groups, num_groups * ROUNDS[schedule], 2 * num_groups)
    for group, peer in itertools.combinations(range(num_groups), 2):
        assert messages(actions, schedule, group, peer) == messages(actions, schedule, peer, group)


def test_schedules_without_a_list_say_why():
    with pytest.raises(ValueError, match="zbv needs 2 stages per device group, not 1"):
        schedule_actions("zbv", 4, 4, 8)


def test_torch_is_not_heard(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        schedule_actions("interleaved_zero_bubble", 4, 8, 2)
    assert not caplog.records


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 4), ("zbv", 8), ("interleaved_1f1b", 12)])
def test_what_makes_lists_quick_changes_none(schedule: str, stages: int, monkeypatch: pytest.MonkeyPatch):
    made = schedule_lists._list_actions.__wrapped__(find_schedule(schedule), 4, stages, 8)
    monkeypatch.setattr(schedule_lists, "_Upcoming", list)
    assert schedule_lists._list_actions.__wrapped__(find_schedule(schedule), 4, stages, 8) == made


@pytest.mark.slow
def test_lists_of_many_groups_are_quick():
    start = time.perf_counter()
    for schedule in schedule_names():
        schedule_lists._list_actions.__wrapped__(find_schedule(schedule), 32, 32 * ROUNDS[schedule], 128)
    assert time.perf_counter() - start < 30  # all took 4 s
