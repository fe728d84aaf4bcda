"""Predicted against measured time of pipeline steps: ``python benchmarks/pipeline.py [--groups 2 4] [--steps 5]``.

Every device group is one gloo process.  Its stages take a known time at each action, asleep (so that few cores are
enough) or computing until that time is over, and send real tensors to each other; each rank runs its action list, and
`simulate_schedule` predicts from the same list.  What a transfer takes is measured by a ping-pong before all.  The
figure is the median over steps of measured / predicted.  What else the machine does delays every wake-up: the longer
an action (``--unit-ms``), the less that matters.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.placement import Axis
from autopar.schedules import find_schedule, schedule_names, schedule_problem, stage_group
from autopar.schedules.action_lists import Action, ScheduleActions, StageCost, simulate_schedule

UNEVEN = (1.0, 1.6, 0.7, 1.3)  # what stages take relative to each other, round and round
PAYLOAD = 1 << 14  # float32 numbers in a message


@dataclass(frozen=True)
class Case:
    """One schedule whose stages take `loads` times the unit per forward; I and W each take as long as F."""

    schedule: str
    num_groups: int
    num_microbatches: int
    mode: str
    is_even: bool

    @property
    def num_stages(self) -> int:
        """Two stages a group where the schedule can have several."""
        return self.num_groups * (1 if self.schedule in ("gpipe", "1f1b") else 2)

    @property
    def loads(self) -> tuple[float, ...]:
        """Of the stages in order; a group of one stage has as much to do as one of two."""
        scale = 2 * self.num_groups / self.num_stages
        return tuple(scale * (1.0 if self.is_even else UNEVEN[s % len(UNEVEN)]) for s in range(self.num_stages))

    @property
    def problem(self) -> str:
        """Why the schedule has no such actions, or ""."""
        return schedule_problem(self.schedule, self.num_groups, self.num_stages, self.num_microbatches)

    @property
    def actions(self) -> ScheduleActions:
        """What runs and what is simulated."""
        return schedule_actions(self.schedule, self.num_groups, self.num_stages, self.num_microbatches)

    @property
    def closed_form(self) -> float | None:
        """The bubble fraction of the papers, of even stages whose F, I and W take equally long.

        Where a V runs all forwards first, its second stages wait for the last group like its first ones for the first:
        that is GPipe's, of stages twice as long.
        """
        record = find_schedule(self.schedule)
        rounds, fill = self.num_stages // self.num_groups, self.num_groups - 1
        if not self.is_even:
            return None
        fill *= rounds if record.is_v_shaped and record.forwards_first else 1
        # the fill is one F and B; of the zero-bubble schedules one F
        units = rounds * self.num_microbatches * (3 if record.splits_backward else 1)
        return fill / (units + fill)


@dataclass(frozen=True)
class Outcome:
    """A step of a case, in seconds; `busy_s` is what all groups had to compute."""

    predicted_s: float
    measured_s: float
    busy_s: float

    @property
    def ratio(self) -> float:
        """Measured / predicted."""
        return self.measured_s / self.predicted_s


class TimedStage:
    """Takes a known time at every action, and passes a tensor on."""

    def __init__(self, case: Case, stage: int, talk: ProcessGroupCommunicator, unit_s: float) -> None:
        """A forward of load 1 takes `unit_s`."""
        self.forward_s = case.loads[stage] * unit_s
        self.spend = SPEND[case.mode]
        self.talk = talk
        self.axis = Axis(case.num_groups, 1)
        self.before, self.after = (
            stage_group(case.schedule, other, case.num_groups) for other in (stage - 1, stage + 1)
        )
        self.outgoing = torch.full((PAYLOAD,), float(stage))
        self.incoming: dict[tuple[str, int], Handle] = {}
        self.sent: list[Handle] = []

    def _act(self, direction: str, microbatch: int, units: float) -> None:
        if (direction, microbatch) in self.incoming:
            self.incoming.pop((direction, microbatch)).wait()
        self.spend(units * self.forward_s)

    def perform(self, action: Action) -> None:
        """An action of this stage."""
        talk, axis, microbatch = self.talk, self.axis, action.microbatch
        match action.kind:
            case "F" | "I" | "W":
                self._act("B" if action.kind == "I" else action.kind, microbatch, 1.0)
            case "B":
                self._act("B", microbatch, 2.0)
            case "SEND_F":
                self.sent.append(talk.start_send(self.outgoing, axis, self.after))
            case "SEND_B":
                self.sent.append(talk.start_send(self.outgoing, axis, self.before))
            case "RECV_F":
                self.incoming["F", microbatch] = talk.start_receive((PAYLOAD,), torch.float32, axis, self.before)
            case _:  # RECV_B
                self.incoming["B", microbatch] = talk.start_receive((PAYLOAD,), torch.float32, axis, self.after)


def compute(seconds: float) -> None:
    """Multiply matrices for that long."""
    until = time.perf_counter() + seconds
    x = torch.ones(96, 96)
    while time.perf_counter() < until:
        torch.mm(x, x)


SPEND = {"sleep": time.sleep, "compute": compute}


def run_cases(cases: Sequence[Case], steps: int, unit_s: float) -> list[list[Outcome]]:
    """The outcomes of each case's steps; every rank calls it, in an initialized process group."""
    talk = ProcessGroupCommunicator()
    axis = Axis(talk.world_size, 1)
    talk.prepare([axis])
    send_s = measure_send(talk, axis)
    found: list[list[Outcome]] = []
    for case in cases:
        run_step(case, talk, unit_s, send_s)  # connections and caches
        found.append([run_step(case, talk, unit_s, send_s) for _ in range(steps)])
    return found


def run_step(case: Case, talk: ProcessGroupCommunicator, unit_s: float, send_s: float) -> Outcome:
    """One step and its prediction."""
    works = {
        stage: TimedStage(case, stage, talk, unit_s)
        for stage in range(case.num_stages)
        if stage_group(case.schedule, stage, case.num_groups) == talk.rank
    }
    actions = case.actions
    dist.barrier()
    started = time.perf_counter()
    for action in actions[talk.rank]:
        works[action.stage].perform(action)
    stopped = time.perf_counter()
    for handle in itertools.chain.from_iterable(stage.sent for stage in works.values()):
        handle.wait()
    # one machine, one monotonic clock
    measured_s = max(gather(talk, stopped)) - min(gather(talk, started))
    taken_s = [load * unit_s for load in case.loads]
    times = tuple(StageCost(s, 2 * s, s, send_s, send_s) for s in taken_s)
    return Outcome(simulate_schedule(actions, times).step_s, measured_s, 3 * case.num_microbatches * sum(taken_s))


def gather(talk: ProcessGroupCommunicator, number: float) -> list[float]:
    """Every rank's number."""
    mine = torch.tensor([number], dtype=torch.float64)
    return talk.all_gather(mine, Axis(talk.world_size, 1), 0).tolist()


def measure_send(talk: ProcessGroupCommunicator, axis: Axis, rounds: int = 50) -> float:
    """Median seconds of one message between ranks 0 and 1; every rank gets it."""
    x = torch.zeros(PAYLOAD)
    taken: list[float] = []
    for _ in range(rounds if talk.rank < 2 else 0):
        started = time.perf_counter()
        if talk.rank == 0:
            talk.start_send(x, axis, 1).wait()
        talk.start_receive((PAYLOAD,), torch.float32, axis, 1 - talk.rank).wait()
        if talk.rank == 1:
            talk.start_send(x, axis, 0).wait()
        taken.append((time.perf_counter() - started) / 2)
    return gather(talk, statistics.median(taken) if taken else 0.0)[0]


def describe(case: Case, outcomes: Sequence[Outcome]) -> str:
    """A line of the table."""
    measured = [outcome.measured_s for outcome in outcomes]
    predicted = statistics.median(outcome.predicted_s for outcome in outcomes)
    ratio = statistics.median(outcome.ratio for outcome in outcomes)
    bubbles = [
        statistics.median(1 - o.busy_s / (case.num_groups * seconds(o)) for o in outcomes)
        for seconds in (lambda o: o.predicted_s, lambda o: o.measured_s)
    ]
    closed = "     -" if case.closed_form is None else f"{case.closed_form:6.3f}"
    return (
        f"{case.mode:8}{case.num_groups:2} {'even' if case.is_even else 'uneven':7} {case.schedule:24}"
        f"{predicted * 1e3:8.1f} {statistics.median(measured) * 1e3:8.1f}  {min(measured) * 1e3:8.1f} -"
        f"{max(measured) * 1e3:8.1f} {100 * (ratio - 1):+7.2f}   {bubbles[0]:6.3f}  {bubbles[1]:6.3f}  {closed}"
    )


def main() -> None:
    """Run all cases, one process a group, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--modes", nargs="+", choices=["sleep", "compute"], default=["sleep", "compute"])
    parser.add_argument("--unit-ms", type=float, default=50.0, help="what F takes in a stage of load 1")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(
        f"# {' '.join(sys.argv)}: Python {platform.python_version()}, torch {torch.__version__}, {cores} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{options.microbatches} microbatches, {options.steps} steps; ms; error of the median ratio in %")
    print(f"{'':42}predicted measured       min -     max  error  bubble fraction  closed")
    print(f"{'mode':8} G {'stages':7} {'schedule':24}{'':38}predicted, measured  form")
    worst = 0.0
    for groups in options.groups:
        cases = [
            case
            for mode in options.modes
            if mode == "sleep" or groups <= cores
            for is_even in (True, False)
            for schedule in schedule_names()
            if not (case := Case(schedule, groups, options.microbatches, mode, is_even)).problem
        ]
        for case, outcomes in zip(cases, launch(groups, cases, options.steps, options.unit_ms / 1e3), strict=True):
            print(describe(case, outcomes), flush=True)
            worst = max(worst, abs(statistics.median(outcome.ratio for outcome in outcomes) - 1))
    print(f"largest error: {100 * worst:.2f} %")


def launch(num_groups: int, *args: Any) -> list[list[Outcome]]:
    """`run_cases` on so many processes; what rank 0 found."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        processes = [
            context.Process(target=run_rank, args=(rank, num_groups, store, results, *args), daemon=True)
            for rank in range(num_groups)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"ranks ended with {[process.exitcode for process in processes]}")
        return results.get()


def run_rank(rank: int, num_groups: int, store: str, results: Any, *args: Any) -> None:
    """One process of `launch`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_groups)
    outcomes = run_cases(*args)
    if rank == 0:
        results.put(outcomes)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
