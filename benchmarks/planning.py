"""How long planning takes, from trace to plan, and how much memory: ``python benchmarks/planning.py [--case NAME]``.

Every case runs in a fresh process.  Shapes are the published ones; models are on the meta device, so nothing is
downloaded or allocated.  The nearest peer's figures for the 8B cases are in the table's last column (CPU seconds, same
kind of machine: 2 shared cores, torch 2.13 CPU; its commit a54c252).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True)
class Case:
    """One planning problem; with `again`, planned in one process by `autopar.explain.planner.Planner` without
    constraints and then under each of these.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    nodes: int
    batch: int
    sequence: int
    peer_cpu_s: float = 0.0
    constraints: tuple[str, ...] = ()
    again: tuple[str, ...] = ()


CASES = {
    "8b-4-layers-64": Case(4, 4096, 14336, 32, 8, 128256, 8, 64, 8192, 381),
    "8b-8-layers-64": Case(8, 4096, 14336, 32, 8, 128256, 8, 64, 8192, 371),
    "8b-16-layers-64": Case(16, 4096, 14336, 32, 8, 128256, 8, 64, 8192, 452),
    "8b-32-layers-64": Case(32, 4096, 14336, 32, 8, 128256, 8, 64, 8192, 631),
    "70b-512": Case(80, 8192, 28672, 64, 8, 128256, 64, 512, 8192),
    "405b-16384": Case(126, 16384, 53248, 128, 8, 128256, 2048, 2048, 8192),
    "405b-16384-flat": Case(126, 16384, 53248, 128, 8, 128256, 2048, 2048, 8192, constraints=("pipeline=1",)),
    "405b-16384-1f1b": Case(
        126, 16384, 53248, 128, 8, 128256, 2048, 2048, 8192, constraints=("pipeline=16", "schedule=1f1b")
    ),
    "8b-64-again": Case(
        32, 4096, 14336, 32, 8, 128256, 8, 64, 8192,
        again=(
            "tensor=8", "pipeline=2", "pipeline=1", "data=8", "zero=3", "recompute=full", "schedule=zbv", "pipeline=4"
        ),
    ),
    "405b-16384-again": Case(
        126, 16384, 53248, 128, 8, 128256, 2048, 2048, 8192, again=("pipeline=1", "zero=0", "pipeline=16")
    ),
}  # fmt: skip


def config_of(case: Case) -> LlamaConfig:
    """The model's configuration."""
    from transformers import LlamaConfig  # noqa: PLC0415

    return LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.hidden, intermediate_size=case.ffn, num_hidden_layers=case.layers,
        num_attention_heads=case.heads, num_key_value_heads=case.kv_heads, max_position_embeddings=case.sequence,
        dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip


def replan(case: Case) -> dict[str, float | str]:
    """Plan one case in this process, then again under other constraints; CPU seconds, and predicted ones of a step."""
    import autopar  # noqa: PLC0415
    from autopar.explain.planner import Planner  # noqa: PLC0415
    from autopar.explain.question import Question  # noqa: PLC0415

    cluster = autopar.Cluster.of("h100", nodes=case.nodes, devices_per_node=8)
    question = Question(cluster, batch=case.batch, sequence=case.sequence)
    row: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as directory:
        config_of(case).save_pretrained(directory)
        planner = Planner(str(Path(directory) / "config.json"))
        planner.model(question)  # its construction is not part of any planning time
        for text in ("", *case.again):
            cpu = time.process_time()
            own = replace(question, constraints=(text,) if text else ())
            plan = planner.answer(own, is_alternative=True, seeks_gap=False).plan
            name = text or "trace and free"
            row[f"{name}: cpu_s"], row[f"{name}: step_s"] = time.process_time() - cpu, plan.step_time_s
    return row


def run_case(case: Case) -> dict[str, float | str]:
    """Plan one case in this process; seconds and bytes."""
    import transformers  # noqa: PLC0415  (its import is not part of any planning time)

    import autopar  # noqa: PLC0415

    config = config_of(case)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(case.batch, case.sequence, dtype=torch.int64)
    cluster = autopar.Cluster.of("h100", nodes=case.nodes, devices_per_node=8)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = autopar.plan(model, cluster, {"input_ids": ids, "labels": ids}, constraints=case.constraints)
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        **{f"{stage}_s": seconds for stage, seconds in plan.planning_s},
        "step_s": plan.step_time_s,
        "gap": plan.optimality_gap,
        "microbatches": plan.num_microbatches,
        "pipeline": f"{plan.schedule} of {len(plan.stages)} stages on {plan.num_groups} groups"
        if plan.stages
        else "none",
        "strategies": "; ".join(
            f"{'x'.join(map(str, s.mesh))} {'/'.join(s.labels)} zero={s.zero}" for s in plan.strategies
        ),
    }


def main() -> None:
    """Run the cases, one process each, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        case = CASES[options.in_process]
        sys.stdout.write(json.dumps(replan(case) if case.again else run_case(case)) + "\n")
        return
    sys.stdout.write(
        f"# {' '.join(sys.argv)}: torch {torch.__version__}, {platform.processor() or platform.machine()}\n"
    )
    for name in options.case:
        done = subprocess.run(
            [sys.executable, __file__, "--in-process", name], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.stdout.write(f"{name}: failed\n{done.stderr[-3000:]}\n")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        peer = f", nearest peer {CASES[name].peer_cpu_s:.0f} CPU s" if CASES[name].peer_cpu_s else ""
        strategies = f"\n    pipeline {row.pop('pipeline')}; {row.pop('strategies')}" if "strategies" in row else ""
        figures = ", ".join(f"{key} {value:.3g}" for key, value in row.items())
        sys.stdout.write(f"{name}: {figures}{peer}{strategies}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
