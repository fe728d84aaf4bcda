"""The action lists that torch's schedules give, and torch's runtime that runs them."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from autopar.errors import InputShapeError, PipelineError
from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.run import schedule_lists
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.lower.run.schedules import StageWork, backward_actions, forward_actions, run_schedule
from autopar.placement import Axis
from autopar.schedule import Action, ScheduleActions, StageCost, parse_action, simulate_schedule
from autopar.schedules import schedule_names, schedule_problem, stage_group

ROUNDS = {name: 1 if name in ("gpipe", "1f1b") else 2 for name in schedule_names()}


def written(actions: ScheduleActions) -> list[str]:
    return [" ".join(map(str, group)) for group in actions]


class Recorder:
    """Work that only writes down what it is told to do; `fails` are texts of actions that raise."""

    def __init__(self, stage: int, log: list[Action], taken: list[str], fails: dict[str, Exception] | None = None):
        self.stage = stage
        self.log = log
        self.taken = taken
        self.fails = fails or {}

    def note(self, kind: str, microbatch: int) -> None:
        action = Action(self.stage, kind, microbatch)
        self.log.append(action)
        if str(action) in self.fails:
            raise self.fails[str(action)]

    def forward(self, microbatch: int) -> None:
        self.note("F", microbatch)

    def backward(self, microbatch: int) -> None:
        self.note("B", microbatch)

    def backward_inputs(self, microbatch: int) -> None:
        self.note("I", microbatch)

    def backward_weights(self, microbatch: int) -> None:
        self.note("W", microbatch)

    def send_forward(self, microbatch: int) -> None:
        self.note("SEND_F", microbatch)

    def receive_forward(self, microbatch: int) -> None:
        self.note("RECV_F", microbatch)

    def send_backward(self, microbatch: int) -> None:
        self.note("SEND_B", microbatch)

    def receive_backward(self, microbatch: int) -> None:
        self.note("RECV_B", microbatch)

    def take_forward(self, microbatch: int, previous: StageWork) -> None:
        assert isinstance(previous, Recorder)
        assert Action(previous.stage, "F", microbatch) == self.log[-1]
        self.taken.append(f"{self.stage}F{microbatch} from {previous.stage}")

    def take_backward(self, microbatch: int, following: StageWork) -> None:
        assert isinstance(following, Recorder)
        assert self.log[-1] in (Action(following.stage, kind, microbatch) for kind in "BI")
        self.taken.append(f"{self.stage}B{microbatch} from {following.stage}")


def record(actions: ScheduleActions, group: int) -> tuple[list[Action], list[str]]:
    log: list[Action] = []
    taken: list[str] = []
    run_schedule(actions, group, {stage: Recorder(stage, log, taken) for stage in stages_of(actions, group)})
    return log, taken


def stages_of(actions: ScheduleActions, group: int) -> list[int]:
    return sorted({action.stage for action in actions[group]})


# --- the lists ---


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
    made = schedule_actions.__wrapped__(schedule, 4, stages, 8)
    monkeypatch.setattr(schedule_lists, "_Upcoming", list)
    assert schedule_actions.__wrapped__(schedule, 4, stages, 8) == made


@pytest.mark.slow
def test_lists_of_many_groups_are_quick():
    start = time.perf_counter()
    for schedule in schedule_names():
        schedule_actions.__wrapped__(schedule, 32, 32 * ROUNDS[schedule], 128)
    assert time.perf_counter() - start < 30  # all took 4 s


# --- the run ---


@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("schedule", schedule_names())
def test_what_runs_is_what_is_simulated(schedule: str, num_groups: int):
    num_stages = num_groups * ROUNDS[schedule]
    actions = schedule_actions(schedule, num_groups, num_stages, 2 * num_groups)
    ran = simulate(num_groups, lambda c: record(actions, c.rank)[0])
    timeline = simulate_schedule(actions, (StageCost(1.0, 2.0, 1.0, 0.1, 0.1),) * num_stages)
    assert tuple(map(tuple, ran)) == tuple(tuple(span.action for span in spans) for spans in timeline.spans) == actions


@pytest.mark.parametrize("schedule", schedule_names())
def test_a_step_can_run_in_two_halves(schedule: str):
    actions = schedule_actions(schedule, 2, 2 * ROUNDS[schedule], 4)
    for group in range(2):
        first, second = record(forward_actions(actions), group)[0], record(backward_actions(actions), group)[0]
        assert {action.kind for action in first} <= {"F", "SEND_F", "RECV_F"}
        assert not {action.kind for action in second} & {"F", "SEND_F", "RECV_F"}
        assert sorted([*first, *second]) == sorted(actions[group])


def test_neighbours_on_one_group_hand_over_directly():
    log, taken = record(schedule_actions("zbv", 2, 4, 4), 1)
    assert not {str(action) for action in log} & {"1SEND_F0", "2RECV_F0", "2SEND_B0", "1RECV_B0"}
    assert sorted(taken) == sorted(
        f"{to} from {source}" for m in range(4) for to, source in [(f"2F{m}", 1), (f"1B{m}", 2)]
    )


def fail_in(action: str, error: Exception) -> Callable[[], None]:
    actions = schedule_actions("1f1b", 2, 2, 2)
    stage = parse_action(action).stage

    def run() -> None:
        run_schedule(actions, stage, {stage: Recorder(stage, [], [], {action: error})}, rank=stage + 4)

    return run


@pytest.mark.parametrize("action", ["1RECV_F1", "1F1", "1B0", "1SEND_B1", "0SEND_F1", "0RECV_B1"])
def test_a_failing_action_is_named(action: str):
    stage = action[0]
    who = rf"rank {4 + int(stage)} \(device group {stage}\)"
    expected = f"{who} failed in stage {stage}, action {action}: ZeroDivisionError: by design"
    with pytest.raises(PipelineError, match=expected) as caught:
        fail_in(action, ZeroDivisionError("by design"))()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "start again" in str(caught.value)


@pytest.mark.parametrize(("kind", "failing"), [("I", "3I0"), ("W", "0W1")])
def test_failing_halves_of_a_backward_are_named(kind: str, failing: str):
    actions = schedule_actions("zbv", 2, 4, 2)
    works = {stage: Recorder(stage, [], [], {failing: OSError("gone")}) for stage in (0, 3)}
    for work in works.values():
        work.log = works[0].log
    with pytest.raises(PipelineError, match=rf"device group 0 failed in stage {failing[0]}, action {failing}: OSError"):
        run_schedule(actions, 0, works)


def test_an_error_of_autopar_passes_with_a_note():
    with pytest.raises(InputShapeError, match="by design") as caught:
        fail_in("1F1", InputShapeError("by design"))()
    assert str(caught.value) == "by design"
    assert caught.value.__notes__ == ["raised on rank 5 (device group 1) in stage 1, action 1F1"]


def test_a_failure_on_one_simulated_rank_unwinds_the_others():
    actions = schedule_actions("gpipe", 2, 2, 2)

    def run(c: Communicator) -> None:
        if c.rank == 0:
            run_schedule(actions, 0, {0: Recorder(0, [], [], {"0F1": ZeroDivisionError()})}, rank=0)
        c.start_receive((), torch.float32, Axis(2, 1), 0).wait()  # never sent

    with pytest.raises(PipelineError, match="action 0F1"):
        simulate(2, run, timeout_s=30)


def test_a_group_needs_work_for_all_its_stages():
    with pytest.raises(ValueError, match=r"device group 0 runs stages \[3\], for which there is no work"):
        run_schedule(schedule_actions("zbv", 2, 4, 4), 0, {0: Recorder(0, [], [])})


class Adder(Recorder):
    """Adds 1 forward and 10 backward to a number that travels through the stages and back."""

    def __init__(self, stage: int, num_stages: int, c: Communicator, schedule: str) -> None:
        super().__init__(stage, [], [])
        self.num_stages = num_stages
        self.c = c
        self.axis = Axis(c.world_size, 1)
        self.group_of = lambda other: stage_group(schedule, other, c.world_size)
        self.incoming: dict[tuple[str, int], Handle | torch.Tensor] = {}
        self.outgoing: dict[tuple[str, int], torch.Tensor] = {}

    def compute(self, direction: str, microbatch: int, start: int, step: int) -> None:
        arrived = self.incoming.pop((direction, microbatch), torch.tensor(start * (microbatch + 1)))
        x = arrived if isinstance(arrived, torch.Tensor) else arrived.wait()
        self.outgoing[direction, microbatch] = x + step

    def forward(self, microbatch: int) -> None:
        self.compute("F", microbatch, 1000, 1)

    def backward(self, microbatch: int) -> None:
        if self.stage == self.num_stages - 1:
            self.incoming["B", microbatch] = self.outgoing["F", microbatch]
        self.compute("B", microbatch, 0, 10)

    def backward_inputs(self, microbatch: int) -> None:
        self.backward(microbatch)

    def backward_weights(self, microbatch: int) -> None:
        assert ("B", microbatch) in self.outgoing

    def send_forward(self, microbatch: int) -> None:
        self.c.start_send(self.outgoing["F", microbatch], self.axis, self.group_of(self.stage + 1))

    def send_backward(self, microbatch: int) -> None:
        self.c.start_send(self.outgoing["B", microbatch], self.axis, self.group_of(self.stage - 1))

    def receive_forward(self, microbatch: int) -> None:
        source = self.group_of(self.stage - 1)
        self.incoming["F", microbatch] = self.c.start_receive((), torch.int64, self.axis, source)

    def receive_backward(self, microbatch: int) -> None:
        source = self.group_of(self.stage + 1)
        self.incoming["B", microbatch] = self.c.start_receive((), torch.int64, self.axis, source)

    def take_forward(self, microbatch: int, previous: StageWork) -> None:
        assert isinstance(previous, Adder)
        self.incoming["F", microbatch] = previous.outgoing["F", microbatch]

    def take_backward(self, microbatch: int, following: StageWork) -> None:
        assert isinstance(following, Adder)
        self.incoming["B", microbatch] = following.outgoing["B", microbatch]


@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_microbatch_travels_there_and_back(schedule: str, num_groups: int):
    num_stages = num_groups * ROUNDS[schedule]
    actions = schedule_actions(schedule, num_groups, num_stages, 2 * num_groups)

    def run(c: Communicator) -> list[int]:
        works = {stage: Adder(stage, num_stages, c, schedule) for stage in stages_of(actions, c.rank)}
        run_schedule(actions, c.rank, works, rank=c.rank)
        return [int(works[0].outgoing["B", m]) for m in range(2 * num_groups)] if c.rank == 0 else []

    assert simulate(num_groups, run)[0] == [1000 * (m + 1) + 11 * num_stages for m in range(2 * num_groups)]
