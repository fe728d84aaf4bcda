"""Whole training steps on 2 and 4 gloo ranks: ``python benchmarks/accuracy.py steps [--ranks 2 4] [--json]``.

Each group of processes (one thread each) profiles the machine, plans a model by search and by force, and trains all
plans in the same run, one step of each in turn, so that whatever else the machine does hits all of them.  How busy the
machine was is measured between the steps, and seconds of computing in the profile are brought to that.  Printed are the
predicted and the measured median step (of the slowest rank), their ratio, the median of the ratios' distances from 1,
and Kendall's tau of the plans' order.  ``--json`` ends with one line of all of it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import autopar
from autopar.api import mesh_ranks, trace_model
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Curve, Profile
from autopar.cost.measure import measure_profile
from autopar.cost.measure.collectives import all_axes
from autopar.cost.measure.timing import Contention
from autopar.lower.communicator import ProcessGroupCommunicator
from autopar.lower.schedules import schedule_actions
from autopar.search import TrainingSpec
from autopar.search.repricing import reprice

Model = tuple[nn.Module, dict[str, Any]]
_FLAT = ("pipeline=1", "microbatches=1", "recompute=none")
CASES: dict[int, tuple[tuple[str, ...], ...]] = {
    2: (
        (),
        (*_FLAT, "data=2", "zero=0"),
        (*_FLAT, "data=2", "zero=3"),
        (*_FLAT, "tensor=2", "zero=0"),
        ("pipeline=1", "microbatches=1", "data=2", "zero=0", "recompute=full"),
        ("pipeline=1", "microbatches=2", "data=2", "zero=2", "recompute=none"),
        ("pipeline=2", "schedule=1f1b", "microbatches=2", "recompute=none"),
    ),
    4: (
        (),
        (*_FLAT, "data=4", "zero=0"),
        (*_FLAT, "data=4", "zero=3"),
        (*_FLAT, "data=2", "tensor=2", "zero=0"),
        (*_FLAT, "tensor=4", "zero=0"),
        ("pipeline=1", "microbatches=2", "data=4", "zero=1", "recompute=full"),
        ("pipeline=2", "schedule=1f1b", "data=2", "microbatches=2", "recompute=none"),
    ),
}
_WARM_UP = 2
_MOMENT_S = 0.05


def _llama() -> Model:
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 1024, (16, 128))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def _gpt2() -> Model:
    config = transformers.GPT2Config(
        vocab_size=2048, n_embd=256, n_layer=4, n_head=8, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 2048, (16, 128))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


MODELS = {"llama": _llama, "gpt2": _gpt2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``accuracy.py steps``."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=sorted(CASES))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=15, help="measured steps of each plan")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for the profile")
    parser.add_argument("--save", type=Path, help="folder for profiles and plans, to look at")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if options.worker is not None:
        _work(options)
        return 0
    groups: list[dict[str, Any]] = []
    for ranks, model in itertools.product(options.ranks, options.models):
        groups.append(_measure(options, ranks, model))
        _print(groups[-1])
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for group in groups for row in group["rows"]]
    total = {"median_error": statistics.median(errors), "least_tau": min(group["tau"] for group in groups)}
    print(f"\nmedian error {total['median_error']:.1%}, least Kendall's tau of a group {total['least_tau']:.2f}")
    if options.json:
        print(json.dumps(total | {"groups": groups}))
    return 0


def _measure(options: argparse.Namespace, ranks: int, model: str) -> dict[str, Any]:
    """Start a group of processes; what its first one reports."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        script = str(Path(__file__).resolve().parents[1] / "accuracy.py")
        own = ("steps", "--worker", str(report), "--models", model, "--steps", str(options.steps))
        more = ("--save", str(options.save)) if options.save else ()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        subprocess.run((*command, script, *own, "--budget", str(options.budget), *more), check=True, env=environment)
        group: dict[str, Any] = json.loads(report.read_text())
    rows = group["rows"]
    group["tau"] = kendall_tau([row["predicted_s"] for row in rows], [row["measured_s"] for row in rows])
    return group


def kendall_tau(one: list[float], other: list[float]) -> float:
    """How alike two orders are: 1 the same, -1 reversed; pairs that are equal in either don't count for or against."""
    pairs = list(itertools.combinations(range(len(one)), 2))
    signs = [(one[i] - one[j]) * (other[i] - other[j]) for i, j in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(pairs)


def _work(options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, [name] = dist.get_world_size(), options.models
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    talk = ProcessGroupCommunicator(mesh_ranks(mesh), "cpu")
    profile = measure_profile(talk, "cpu", options.budget, axes=all_axes(world))
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    ours = [
        autopar.parallelize(copy.deepcopy(model), mesh, inputs, constraints=constraints, profile=profile)
        for constraints in CASES[world]
    ]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in ours]
    taken: list[list[float]] = [[] for _ in ours]
    contention = Contention(torch.device("cpu"))
    for step in range(options.steps + _WARM_UP):
        for number, (each, optimizer) in enumerate(zip(ours, optimizers, strict=True)):
            seconds = _step(each, optimizer, inputs)
            _work_a_moment(contention)
            if step >= _WARM_UP:
                taken[number].append(seconds)
    busy = _mean(contention.factor())
    if dist.get_rank() == 0:
        prices = ClusterPrices(Cluster.from_mesh(mesh), _at_contention(profile, busy))
        program, training = trace_model(model, inputs).program, TrainingSpec()
        rows = [
            {
                "plan": " ".join(constraints) or "searched",
                "predicted_s": reprice(program, each.plan, prices, training, schedule_actions).step_time_s,
                "measured_s": statistics.median(seconds),
                "quartiles_s": statistics.quantiles(seconds, n=4)[::2],
            }
            for constraints, each, seconds in zip(CASES[world], ours, taken, strict=True)
        ]
        options.worker.write_text(json.dumps({"model": name, "ranks": world, "contention": busy, "rows": rows}))
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            profile.save(options.save / f"profile-{name}-{world}.json")
            for number, each in enumerate(ours):
                each.plan.save(options.save / f"plan-{name}-{world}-{number}.json")
    dist.barrier()
    dist.destroy_process_group()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> float:
    """Seconds of one step on the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    model(**inputs).loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - started
    optimizer.zero_grad()
    return _slowest(seconds)


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


def _work_a_moment(contention: Contention) -> None:
    """Keep this rank's core busy, as all ranks do now, and count what passes."""
    dist.barrier()
    with contention.counting():
        deadline = time.perf_counter() + _MOMENT_S
        while time.perf_counter() < deadline:
            math.sqrt(2.0)


def _at_contention(profile: Profile, contention: float) -> Profile:
    """`profile` as if its ops had been measured while the machine was so busy; collectives stay as they are."""

    def scaled(curve: Curve) -> Curve:
        factor = contention / curve.contention
        points = tuple(replace(point, seconds=point.seconds * factor) for point in curve.points)
        return replace(curve, points=points, contention=contention)

    own_time = {key: scaled(curve) for key, curve in profile.curves.items() if not key.startswith("collective/")}
    return replace(profile, curves={**profile.curves, **own_time})


def _print(group: dict[str, Any]) -> None:
    print(f"\n{group['model']} on {group['ranks']} ranks (contention {group['contention']:.2f})")
    print(f"{'plan':64s} {'predicted':>10s} {'measured':>10s} {'quartiles':>15s} {'ratio':>6s}")
    for row in group["rows"]:
        low, high = (f"{each * 1e3:.0f}" for each in row["quartiles_s"])
        ratio = row["predicted_s"] / row["measured_s"]
        times = f"{row['predicted_s'] * 1e3:8.0f}ms {row['measured_s'] * 1e3:8.0f}ms {low + '-' + high:>15s}"
        print(f"{row['plan']:64s} {times} {ratio:6.2f}")
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in group["rows"]]
    print(f"median error {statistics.median(errors):.1%}, Kendall's tau {group['tau']:.2f}", flush=True)
