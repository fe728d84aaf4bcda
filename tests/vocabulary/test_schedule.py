"""Schedules as data: their text, and the simulated timeline against closed forms and against its own rules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.lower.run.schedule_lists import schedule_actions
from autopar.schedules import schedule_names, schedule_problem, stage_group
from autopar.schedules.action_lists import (
    Action,
    ScheduleActions,
    Span,
    StageCost,
    Timeline,
    parse_action,
    peak_in_flight,
    simulate_schedule,
)

FORWARD_S, BACKWARD_S = 1.0, 2.5
SIZES = [(2, 2), (2, 5), (4, 4), (4, 8), (4, 9), (8, 32)]  # groups, microbatches


def balanced(schedule: str, num_groups: int, num_microbatches: int, rounds: int, times: StageCost) -> Timeline:
    num_stages = num_groups * rounds
    actions = schedule_actions(schedule, num_groups, num_stages, num_microbatches)
    return simulate_schedule(actions, (times,) * num_stages)


def lists(*texts: str) -> ScheduleActions:
    return tuple(tuple(parse_action(text) for text in listed.split()) for listed in texts)


# --- text and layout ---


@pytest.mark.parametrize("kind", ["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"])
def test_an_action_is_text(kind: str):
    action = Action(12, kind, 3)
    assert str(action) == f"12{kind}3"
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 ", "2UNSHARD0"])
def test_what_is_no_action_is_refused(text: str):
    with pytest.raises(ValueError, match="not a pipeline action such as '2F0'"):
        parse_action(text)


def test_stages_go_round_or_there_and_back():
    assert [stage_group("interleaved_1f1b", stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [stage_group("zbv", stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("2f2b", 2, 2, 4), "no schedule '2f2b'"),
        (("gpipe", 1, 1, 4), "can't be divided among 1 device groups"),
        (("gpipe", 4, 6, 4), "6 stages can't be divided among 4"),
        (("gpipe", 2, 4, 4), "gpipe needs 1 stages per device group, not 2"),
        (("interleaved_1f1b", 2, 2, 4), "needs 2 or more stages"),
        (("zbv", 2, 6, 4), "zbv needs 2 stages per device group, not 3"),
        (("1f1b", 4, 4, 3), "at least as many microbatches as stages"),
        (("interleaved_1f1b", 4, 8, 9), "can't run 9 microbatches in even rounds"),
    ],
)
def test_what_a_schedule_cannot_run_has_a_reason(arguments: tuple[str, int, int, int], reason: str):
    assert reason in schedule_problem(*arguments)


@pytest.mark.parametrize("schedule", schedule_names())
def test_what_a_schedule_can_run_has_none(schedule: str):
    rounds = 1 if schedule in ("gpipe", "1f1b") else 2
    assert schedule_problem(schedule, 4, 4 * rounds, 8) == ""


# --- closed forms: balanced stages, transfers that take no time ---


def bubble_fraction(timeline: Timeline) -> float:
    """The share of all groups' time up to the end of the step in which they don't compute."""
    computing = sum(s.stop_s - s.start_s for spans in timeline.spans for s in spans if s.action.kind in "FBIW")
    return 1 - computing / (timeline.step_s * len(timeline.spans))


@pytest.mark.parametrize(("groups", "microbatches"), SIZES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_one_stage_a_group_fills_and_drains_once(schedule: str, groups: int, microbatches: int):
    timeline = balanced(schedule, groups, microbatches, 1, StageCost(FORWARD_S, BACKWARD_S))
    assert timeline.step_s == pytest.approx((microbatches + groups - 1) * (FORWARD_S + BACKWARD_S))
    assert bubble_fraction(timeline) == pytest.approx((groups - 1) / (microbatches + groups - 1))


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(("groups", "microbatches"), [(2, 2), (4, 4), (4, 16), (8, 24)])
def test_interleaving_divides_the_bubble_by_the_stages_a_group(groups: int, microbatches: int, rounds: int):
    timeline = balanced("interleaved_1f1b", groups, microbatches, rounds, StageCost(FORWARD_S, BACKWARD_S))
    assert bubble_fraction(timeline) == pytest.approx((groups - 1) / (rounds * microbatches + groups - 1))


@pytest.mark.parametrize(("groups", "microbatches"), [(2, 4), (4, 8), (4, 13), (8, 24)])
def test_zbv_never_idles_once_it_has_begun(groups: int, microbatches: int):
    # arXiv 2401.10241, section 6: no bubble if F, I and W take equally long, but for the time until a group begins
    timeline = balanced("zbv", groups, microbatches, 2, StageCost(1.0, 2.0, 1.0))
    for group, spans in enumerate(timeline.spans):
        computing = [span for span in spans if span.action.kind in "FBIW"]
        assert computing[0].start_s == group
        assert computing[-1].stop_s == group + 6 * microbatches
    assert bubble_fraction(timeline) == pytest.approx((groups - 1) / (6 * microbatches + groups - 1))


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("groups", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_interleaved_zero_bubble_fills_with_weights(groups: int, microbatches: int, rounds: int):
    # the same paper's ZB-H1: (G - 1) (F + I - W) is left of 1F1B's (G - 1) (F + I + W)
    timeline = balanced("interleaved_zero_bubble", groups, microbatches, rounds, StageCost(1.0, 2.0, 1.0))
    assert timeline.step_s == pytest.approx(3 * rounds * microbatches + groups - 1)


@pytest.mark.parametrize(("groups", "microbatches"), SIZES)
def test_what_is_held_at_the_peak(groups: int, microbatches: int):
    held, weights = (10.0,) * groups, (0.0,) * groups
    fill_first = schedule_actions("gpipe", groups, groups, microbatches)
    assert peak_in_flight(fill_first, held, weights) == (10.0 * microbatches,) * groups
    in_turn = schedule_actions("1f1b", groups, groups, microbatches)
    assert peak_in_flight(in_turn, held, weights) == tuple(10.0 * min(microbatches, groups - s) for s in range(groups))


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_zbv_holds_as_much_on_every_group(groups: int):
    # 2 G halves of what a stage of 1F1B holds: as much as 1F1B's first stage
    actions = schedule_actions("zbv", groups, 2 * groups, 4 * groups)
    assert peak_in_flight(actions, (1.0,) * 2 * groups, (0.25,) * 2 * groups) == (2.0 * groups,) * groups


def test_a_weight_half_is_held_until_its_w():
    actions = lists("0F0 0F1 0I0 0F2 0W0 0I1 0I2 0W1 0W2 1F0 1B0")
    assert peak_in_flight(actions, (10.0, 1.0), (4.0, 0.0)) == (24.0,)  # after 0F2: two whole ones, and one half
    assert peak_in_flight(actions, (10.0, 100.0), (4.0, 0.0)) == (100.0,)


# --- transfers ---


def test_transfers_do_not_hold_the_sender_and_queue_on_their_link():
    actions = lists("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1")
    timeline = simulate_schedule(actions, (StageCost(1.0, 0.0, 0.0, 5.0), StageCost(2.0, 0.0)))
    assert [(str(span.action), span.start_s, span.stop_s) for span in timeline.spans[0]] == [
        ("0F0", 0, 1),
        ("0SEND_F0", 1, 1),
        ("0F1", 1, 2),
        ("0SEND_F1", 2, 2),
    ]
    assert [(str(span.action), span.start_s, span.stop_s) for span in timeline.spans[1]] == [
        ("1RECV_F0", 1, 6),
        ("1F0", 6, 8),
        ("1RECV_F1", 8, 13),  # not before the receiver has come to it
        ("1F1", 13, 15),
    ]
    assert timeline.step_s == 15
    assert bubble_fraction(timeline) == pytest.approx(1 - 6 / 30)
    early = lists("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1")
    spans = simulate_schedule(early, (StageCost(1.0, 0.0, 0.0, 5.0), StageCost(2.0, 0.0))).spans[1]
    assert [span.start_s for span in spans] == [1, 6, 6, 11]


def test_both_directions_of_a_link_run_at_once():
    actions = schedule_actions("1f1b", 2, 2, 8)
    one_way = simulate_schedule(actions, (StageCost(1.0, 1.0, 0.0, 0.5, 0.0),) * 2).step_s
    other_way = simulate_schedule(actions, (StageCost(1.0, 1.0, 0.0, 0.0, 0.5),) * 2).step_s
    both_ways = simulate_schedule(actions, (StageCost(1.0, 1.0, 0.0, 0.5, 0.5),) * 2).step_s
    assert both_ways <= one_way + other_way - simulate_schedule(actions, (StageCost(1.0, 1.0),) * 2).step_s


def test_an_empty_schedule_takes_no_time():
    assert simulate_schedule(((), ()), ()).step_s == 0.0


@pytest.mark.parametrize(
    ("actions", "stuck"),
    [
        (lists("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"), "group 0 waits in 0B0 for 0RECV_B0; group 1 waits in 1F0"),
        (lists("0F0 0SEND_F0", "1F0"), "group 1 waits in 1F0 for 1RECV_F0"),
        (lists("0F0 1B0 1F0"), "group 0 waits in 1B0 for 1F0"),
        (lists("0SEND_F0 0F0", "1RECV_F0 1F0"), "group 0 waits in 0SEND_F0 for 0F0"),
        (lists("0F0 0W0 0I0"), "group 0 waits in 0W0 for 0B0"),
        (
            lists("0F0 0RECV_B0 0B0 0SEND_F0", "1RECV_F0 1F0 1B0 1SEND_B0"),
            "group 0 waits in 0B0 for 0RECV_B0; group 1 waits in 1F0 for 1RECV_F0",
        ),
    ],
)
def test_lists_that_never_end_say_where_each_group_is(actions: ScheduleActions, stuck: str):
    with pytest.raises(ValueError, match=f"the schedule never ends: {stuck}"):
        simulate_schedule(actions, (StageCost(1.0, 1.0),) * 2)


# --- any legal lists ---


class Dealer:
    """Deals out a random legal step: at any time some action whose inputs exist, messages received in their order."""

    def __init__(self, source: random.Random, num_groups: int, num_stages: int, num_microbatches: int) -> None:
        self.source = source
        self.groups = [source.randrange(num_groups) for _ in range(num_stages)]
        self.lists: list[list[Action]] = [[] for _ in range(num_groups)]
        self.under_way: dict[tuple[int, int], list[Action]] = {}  # sender, receiver -> RECVs not listed yet
        self.last = num_stages - 1
        self.is_split = [source.random() < 0.5 for _ in range(num_stages)]
        self.open = [Action(0, "F", microbatch) for microbatch in range(num_microbatches)]

    def deal(self) -> ScheduleActions:
        while self.open:
            action = self.open.pop(self.source.randrange(len(self.open)))
            self.receive(action)
            self.lists[self.groups[action.stage]].append(action)
            self.go_on(action)
            for road in self.under_way:
                if self.source.random() < 0.3:
                    self.list_receives(road, self.source.randrange(3))
        for road in self.under_way:
            assert not self.under_way[road]
        return tuple(map(tuple, self.lists))

    def go_on(self, action: Action) -> None:
        stage, kind, microbatch = action
        backward = "I" if self.is_split[stage] else "B"
        if kind == "F" and stage == self.last:
            self.open.append(Action(stage, backward, microbatch))
        elif kind == "F":
            self.send(action, stage + 1)
            self.open.append(Action(stage + 1, "F", microbatch))
        elif kind in "BI" and stage:
            self.send(action, stage - 1)
            self.open.append(Action(stage - 1, "I" if self.is_split[stage - 1] else "B", microbatch))
        if kind == "I":
            self.open.append(Action(stage, "W", microbatch))

    def send(self, action: Action, to: int) -> None:
        road = (self.groups[action.stage], self.groups[to])
        if road[0] != road[1]:
            direction = "F" if action.kind == "F" else "B"
            self.lists[road[0]].append(Action(action.stage, f"SEND_{direction}", action.microbatch))
            self.under_way.setdefault(road, []).append(Action(to, f"RECV_{direction}", action.microbatch))

    def receive(self, action: Action) -> None:
        wanted = Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch)
        for road, receives in self.under_way.items():
            if action.kind != "W" and wanted in receives:
                self.list_receives(road, receives.index(wanted) + 1)

    def list_receives(self, road: tuple[int, int], number: int) -> None:
        self.lists[road[1]] += self.under_way[road][:number]
        del self.under_way[road][:number]


def by_action(timeline: Timeline) -> dict[Action, Span]:
    return {span.action: span for spans in timeline.spans for span in spans}


def sender_of(action: Action) -> Action:
    is_forward = action.kind == "RECV_F"
    return Action(action.stage + (-1 if is_forward else 1), "SEND_F" if is_forward else "SEND_B", action.microbatch)


def inputs_of(action: Action, spans: dict[Action, Span]) -> Iterable[Span]:
    """The spans of what `action`, which computes, reads."""
    stage, kind, microbatch = action
    step = -1 if kind == "F" else 1
    direction = "F" if kind == "F" else "B"
    candidates = [Action(stage, f"RECV_{direction}", microbatch)] if kind != "W" else []
    candidates += [Action(stage, "I" if kind == "W" else "F", microbatch)] if kind != "F" else []
    candidates += [Action(stage + step, other, microbatch) for other in ("F" if kind == "F" else "BI") if kind != "W"]
    found = [spans[candidate] for candidate in candidates if candidate in spans]
    has_receive = any(span.action.kind.startswith("RECV") for span in found)
    return [span for span in found if span.action.stage == stage or not has_receive]


def check_timeline(timeline: Timeline, stages: tuple[StageCost, ...]) -> None:
    """Everything runs as early as the rules allow, and not earlier."""
    spans = by_action(timeline)
    links: dict[tuple[int, int], float] = {}
    group_of = {span.action.stage: group for group, listed in enumerate(timeline.spans) for span in listed}
    reached: dict[Action, float] = {}
    for listed in timeline.spans:
        clock = 0.0
        for action, start_s, stop_s in listed:
            times = stages[action.stage]
            reached[action] = clock
            if action.kind in ("F", "B", "I", "W"):
                seconds = {
                    "F": times.forward_s,
                    "B": times.backward_s,
                    "I": times.backward_s - times.weight_s,
                    "W": times.weight_s,
                }[action.kind]
                assert start_s == max([clock, *(span.stop_s for span in inputs_of(action, spans))])
                assert stop_s == start_s + seconds
                clock = stop_s
            elif action.kind.startswith("SEND"):
                assert start_s == stop_s == clock
    receives = [span for span in spans.values() if span.action.kind.startswith("RECV")]
    for action, start_s, stop_s in sorted(receives, key=lambda span: (span.start_s, span.stop_s)):
        sent = sender_of(action)
        link = (group_of[sent.stage], group_of[action.stage])
        times = stages[sent.stage]
        assert start_s == max(reached[sent], reached[action], links.get(link, 0.0))
        assert stop_s == start_s + (times.send_forward_s if action.kind == "RECV_F" else times.send_backward_s)
        links[link] = stop_s


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5))
def test_any_legal_lists_run_as_early_as_the_rules_allow(
    source: random.Random, num_groups: int, num_stages: int, num_microbatches: int
):
    actions = Dealer(source, num_groups, num_stages, num_microbatches).deal()
    stages = tuple(
        StageCost(source.randrange(5), 3.0 + source.randrange(5), source.randrange(4), *(source.choices(range(4), k=2)))
        for _ in range(num_stages)
    )
    timeline = simulate_schedule(actions, stages)
    assert tuple(tuple(span.action for span in spans) for spans in timeline.spans) == actions
    check_timeline(timeline, stages)
    counts = Counter(action.kind for listed in actions for action in listed)
    assert counts["F"] == counts["B"] + counts["I"] == num_stages * num_microbatches
    assert 0 <= bubble_fraction(timeline) < 1


@pytest.mark.parametrize("schedule", schedule_names())
def test_torchs_lists_run_as_early_as_the_rules_allow(schedule: str):
    rounds = 1 if schedule in ("gpipe", "1f1b") else 2
    stages = tuple(StageCost(1.0 + s % 3, 4.0 + s % 2, 1.5, 0.5, 0.25) for s in range(4 * rounds))
    check_timeline(simulate_schedule(schedule_actions(schedule, 4, 4 * rounds, 8), stages), stages)
