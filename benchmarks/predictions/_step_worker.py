"""One rank of ``accuracy.py steps``: profiles, plans, predicts and runs."""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.api import mesh_ranks, trace_model
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.cost.measure import measure_profile
from autopar.cost.measure.collectives import all_axes
from autopar.cost.profile import LayerTime
from autopar.lower.communication.communicator import ProcessGroupCommunicator
from autopar.lower.communication.consensus import share_asking
from autopar.lower.run.schedules import schedule_actions
from autopar.plan import Plan
from autopar.planning.timed_layers import LayerTimer, search_with_timed_layers
from autopar.planning.timed_together import AskedLayer, LayerAnswers, asking_all
from autopar.search import SearchRequest, TrainingSpec
from autopar.trace import Traced
from benchmarks.predictions._step_cases import CASES, MODELS

_LAYERS_S = 4.0
_HEAP_BLOCKS, _BLOCK_BYTES = 48, 24 * 2**20
_WARM_UP = 2


@dataclass
class _Case:
    """A plan, what it was forced to (several, if they lead to the same), and its steps: seconds of the slowest rank;
    seconds of work of the ranks' threads that run the model, and of all threads, on average."""

    plan: Plan
    names: list[str]
    seconds: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)
    all_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """What is reported of it."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        measured_s = statistics.median(self.seconds)
        return {
            "plan": " = ".join(self.names), "predicted_s": self.plan.step_time_s, "measured_s": measured_s,
            "spread": (high - low) / measured_s, "own_s": statistics.median(self.own_s),
            "all_s": statistics.median(self.all_s), "price_source": dict(self.plan.price_source),
        }  # fmt: skip


def work(options: argparse.Namespace) -> None:
    """Do this rank's part; the first one writes the report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, [name] = dist.get_world_size(), options.models
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    talk = ProcessGroupCommunicator(mesh_ranks(mesh), "cpu")
    _say("profile")
    profile = measure_profile(talk, "cpu", options.budget, options.folder, axes=all_axes(world))
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    traced = trace_model(model, inputs)
    _say("plans")
    planner = _Planner(
        traced,
        world,
        ClusterPrices(Cluster.from_mesh(mesh), profile).of_program(traced.program, world),
        talk,
        options.folder,
        name,
    )
    cases: list[_Case] = []
    for constraints in CASES[world]:
        text = " ".join(constraints) or "searched"
        if options.only and not any(word in text for word in options.only):
            continue
        plan = planner.plan(constraints)
        same = [case for case in cases if _decisions(case.plan) == _decisions(plan)]
        if same:
            same[0].names.append(text)
        else:
            cases.append(_Case(plan, [text]))
    _say("steps")
    _grow_heap()
    ours = [autopar.parallelize(copy.deepcopy(model), mesh, inputs, plan=case.plan) for case in cases]
    others = _run(cases, ours, inputs, options.rounds, options.steps)
    if dist.get_rank() == 0:
        rows = [case.row() for case in cases]
        options.worker.write_text(json.dumps({"model": name, "ranks": world, "others": others, "rows": rows}))
        planner.save(cases)
    dist.barrier()
    dist.destroy_process_group()


def _grow_heap() -> None:
    """Touch more memory than all plans need: it stays with the process (see the environment in `steps`).

    Plans that take turns find the heap in pieces, and one or the other would still grow it, and pay for each new page,
    in steps that count: up to half a step, which no step of a training run does after some.
    """
    blocks = [torch.zeros(_BLOCK_BYTES, dtype=torch.uint8) for _ in range(_HEAP_BLOCKS)]
    for block in blocks:
        block.fill_(1)


def _run(
    cases: Sequence[_Case], models: Sequence[nn.Module], inputs: dict[str, Tensor], rounds: int, steps: int
) -> float:
    """Train all models in turn, in each round one step of each that does not count and `steps` that do; the first two
    rounds don't count at all.  Returns which part of the cores others had meanwhile, the machine's host included.

    A step behind another plan's finds caches and memory as that one left them, which no step of a training run does.
    """
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    started_s, taken_s, own_s = time.perf_counter(), _taken_s(), time.process_time()
    for number in range(rounds + _WARM_UP):
        for case, model, optimizer in zip(cases, models, optimizers, strict=True):
            for step in range(steps + 1):
                taken = _step(model, optimizer, inputs)
                if step and number >= _WARM_UP:
                    case.seconds.append(_slowest(taken[0]))
                    case.own_s.append(_mean(taken[1]))
                    case.all_s.append(_mean(taken[2]))
    all_own_s = _mean(time.process_time() - own_s) * dist.get_world_size()
    available_s = (time.perf_counter() - started_s) * (os.cpu_count() or 1)
    return max(0.0, _taken_s() - taken_s - all_own_s) / available_s


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> tuple[float, float, float]:
    """Seconds of one step on this rank; those that its thread worked; that all its threads worked."""
    dist.barrier()
    clocks = time.perf_counter, time.thread_time, time.process_time
    started = [clock() for clock in clocks]
    model(**inputs).loss.backward()
    optimizer.step()
    passed_s, own_s, all_s = (clock() - start for clock, start in zip(clocks, started, strict=True))
    optimizer.zero_grad()
    return passed_s, own_s, all_s


class _Planner:
    """Searches and predicts as `parallelize` does, with layers that were timed, on the first rank; the others wait."""

    def __init__(
        self, traced: Traced, world: int, prices: ClusterPrices, talk: ProcessGroupCommunicator, folder: Path, name: str
    ) -> None:
        self.traced, self.world, self.prices, self.talk, self.folder = traced, world, prices, talk, folder
        self.name = f"{name}-{world}"
        known = dict(prices.profile.layers) if prices.profile else {}
        self.timer = LayerTimer(traced.program, talk.device, traced.constants, known=known, budget_s=_LAYERS_S)

    def plan(self, constraints: tuple[str, ...]) -> Plan:
        """The plan that these lead to."""
        training = TrainingSpec().on_device(self.prices.device)
        request = SearchRequest(self.prices.memory_bytes, training, constraints, schedules=schedule_actions)

        def search(ask: Callable[[AskedLayer], list[LayerTime | None]]) -> Plan:
            self.timer.measure = asking_all(ask, self.timer)
            return search_with_timed_layers(self.traced.program, self.world, self.prices, request, self.timer)

        return share_asking(self.talk.process_group, search, LayerAnswers(self.timer))

    def save(self, cases: Sequence[_Case]) -> None:
        """Keep plans and the profile, to look at."""
        profile: Profile | None = self.prices.profile
        assert profile is not None
        profile.with_layers(self.timer.known).save(self.folder / f"steps-profile-{self.name}.json")
        for number, case in enumerate(cases):
            case.plan.save(self.folder / f"plan-{self.name}-{number}.json")


def _decisions(plan: Plan) -> str:
    """What a plan does, without what is said about it."""
    plain = replace(plan, costs=(), step_time_s=0.0, peak_memory_bytes=0.0, memory_limit_bytes=0.0, optimality_gap=0.0,
                    price_source=(), constraints=(), notes=(), planning_s=(), overlapped_s=0.0)  # fmt: skip
    return hashlib.sha256(repr(plain).encode()).hexdigest()


def _say(what: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)


def _slowest(value: float) -> float:
    """The largest of all ranks' values."""
    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def _mean(value: float) -> float:
    """The mean of all ranks' values."""
    found = torch.tensor(value)
    dist.all_reduce(found)
    return found.item() / dist.get_world_size()


def _taken_s() -> float:
    """Seconds of all cores that somebody used, since the machine began: not idle, and not waiting for a disk."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
