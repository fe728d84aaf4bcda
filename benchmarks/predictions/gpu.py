"""Training steps of LLaMA-like models on one NVIDIA GPU: ``python benchmarks/accuracy.py gpu [--json] [--csv FILE]``.

For several widths, lengths and ways to recompute, eager and compiled: the step time and the peak memory that the plan
promises beside what a real step takes.  Prices come from a profile of this GPU, which is measured first where there is
none; compute is bfloat16, parameters and AdamW are float32.  Without a GPU it says so and ends with status 1.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError

_WARM_UP = 3
_STEPS = 8


@dataclass(frozen=True)
class Case:
    """One model and how it is trained."""

    width: int
    layers: int
    batch: int
    length: int
    recompute: str
    is_compiled: bool


@dataclass(frozen=True)
class Outcome:
    """What was predicted and what was measured; `problem` is why not."""

    width: int
    layers: int
    batch: int
    length: int
    recompute: str
    is_compiled: bool
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_bytes: float = 0.0
    measured_bytes: float = 0.0
    problem: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may follow ``accuracy.py gpu``."""
    parser.add_argument("--csv", type=Path, help="write the rows there")
    parser.add_argument("--quick", action="store_true", help="four cases instead of all")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, print; returns the exit status."""
    if not torch.cuda.is_available():
        print("no GPU here: this compares real steps on one NVIDIA GPU with what was predicted; run it where "
              "torch.cuda.is_available()", file=sys.stderr)  # fmt: skip
        return 1
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1)
    try:
        cases = list(_cases())
        outcomes = [_compare(case) for case in (cases[:: max(1, len(cases) // 4)] if options.quick else cases)]
    finally:
        dist.destroy_process_group()
    _print(outcomes)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Outcome)])
            writer.writeheader()
            writer.writerows(map(asdict, outcomes))
    done = [outcome for outcome in outcomes if not outcome.problem]
    if options.json:
        found = {name: _median_error(done, name) for name in ("s", "bytes")}
        print(json.dumps({"median_absolute_error": found, "cases": len(done), "failed": len(outcomes) - len(done)}))
    return 0 if done else 1


def _cases() -> Iterator[Case]:
    for is_compiled in (False, True):
        for width, layers, batch, length in (
            (1024, 16, 8, 1024),
            (2048, 16, 4, 2048),
            (4096, 4, 2, 4096),
            (2048, 8, 1, 8192),
        ):
            for recompute in ("none", "selective", "full"):
                yield Case(width, layers, batch, length, recompute, is_compiled)


def _compare(case: Case) -> Outcome:
    torch.manual_seed(0)
    gc.collect()
    torch.cuda.empty_cache()
    try:
        return _train(case)
    except (AutoparError, torch.cuda.OutOfMemoryError) as error:
        return Outcome(**asdict(case), problem=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _train(case: Case) -> Outcome:
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=case.width, intermediate_size=case.width * 11 // 4 // 256 * 256,
        num_hidden_layers=case.layers, num_attention_heads=case.width // 128, num_key_value_heads=case.width // 128,
        max_position_embeddings=case.length, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(32000, (case.batch, case.length), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    mesh = init_device_mesh("cuda", (1,))
    constraints = [f"recompute={case.recompute}", "microbatches=1"]
    parallel = autopar.parallelize(
        model, mesh, batch, precision="bf16", constraints=constraints, compile=case.is_compiled
    )
    optimizer = torch.optim.AdamW(parallel.parameters())
    seconds: list[float] = []
    for number in range(_WARM_UP + _STEPS):
        if number == _WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        parallel(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return Outcome(
        **asdict(case),
        predicted_s=parallel.plan.step_time_s, measured_s=statistics.median(seconds[_WARM_UP:]),
        predicted_bytes=parallel.plan.peak_memory_bytes, measured_bytes=float(torch.cuda.max_memory_allocated()),
    )  # fmt: skip


def _ratio(outcome: Outcome, name: str) -> float:
    return getattr(outcome, f"predicted_{name}") / getattr(outcome, f"measured_{name}")


def _median_error(outcomes: list[Outcome], name: str) -> float:
    return statistics.median(abs(_ratio(outcome, name) - 1) for outcome in outcomes) if outcomes else 0.0


def _print(outcomes: list[Outcome]) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"{'width':>5} {'layers':>6} {'batch':>5} {'length':>6} {'recompute':<10} {'':<8} "
          + 2 * f"{'predicted':>10} {'measured':>10} {'ratio':>6} ")  # fmt: skip
    for o in outcomes:
        head = (f"{o.width:>5} {o.layers:>6} {o.batch:>5} {o.length:>6} {o.recompute:<10} "
                f"{'compiled' if o.is_compiled else 'eager':<8} ")  # fmt: skip
        if o.problem:
            print(f"{head}{o.problem}")
            continue
        print(
            f"{head}{o.predicted_s * 1e3:>7.1f} ms {o.measured_s * 1e3:>7.1f} ms {_ratio(o, 's'):>6.2f} "
            f"{o.predicted_bytes / 2**30:>6.1f} GiB {o.measured_bytes / 2**30:>6.1f} GiB {_ratio(o, 'bytes'):>6.2f}"
        )
    done = [outcome for outcome in outcomes if not outcome.problem]
    print(f"median absolute error: step time {_median_error(done, 's'):.1%}, peak memory "
          f"{_median_error(done, 'bytes'):.1%}, over {len(done)} of {len(outcomes)} cases")  # fmt: skip
