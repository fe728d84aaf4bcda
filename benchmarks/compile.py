"""What ``parallelize(compile=True)`` costs and gives: ``python benchmarks/compile.py [--layers 4 32] [--steps 10]``.

A LLaMA-shaped model with ``tensor=2`` on two gloo processes of one thread each, in float32.  Compile time is that of
the first step beyond that of a later one, without inductor's caches on disk; layers of one kind share their compiled
program, so it should hardly depend on their number.  Steps of the eager and of the compiled model run in turn, so that
whatever else the machine does hits both.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CONSTRAINTS = ("tensor=2", "zero=0", "recompute=none", "microbatches=1")


def make_model(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and a global batch of 2048 tokens."""
    import transformers  # noqa: PLC0415  (the launching process does not need it)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=256, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 512, (8, 256))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def step_s(model: Any, inputs: dict[str, Tensor]) -> float:
    """Seconds of forward and backward, of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    model(**inputs).loss.backward()
    model.zero_grad()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def run(layers: int, steps: int) -> None:
    """Measure one depth; every rank runs this."""
    import autopar  # noqa: PLC0415

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, inputs = make_model(layers)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    eager, compiled = (
        autopar.parallelize(model, mesh, inputs, constraints=CONSTRAINTS, profile=False, compile=compile_)
        for compile_ in (False, True)
    )
    step_s(eager, inputs)
    first_s = step_s(compiled, inputs)
    pairs = [(step_s(eager, inputs), step_s(compiled, inputs)) for _ in range(steps)]
    if dist.get_rank() == 0:
        eager_s, compiled_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(compiled / eager for eager, compiled in pairs)
        low, _, high = statistics.quantiles(ratios, n=4)
        sys.stdout.write(
            f"{layers:3d} layers: compile {first_s - compiled_s:6.1f} s; step eager {eager_s:.4f} s, compiled "
            f"{compiled_s:.4f} s, ratio median {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f}, "
            f"{steps} steps)\n"
        )
    dist.destroy_process_group()


def main() -> None:
    """Launch every depth under torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 32])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(options.layers[0], options.steps)
        return
    sys.stdout.write(
        f"# {' '.join(sys.argv)}: torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, "
        "2 ranks of 1 thread, gloo\n"
    )
    environment = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    for layers in options.layers:
        sys.stdout.flush()
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        arguments = ["--layers", str(layers), "--steps", str(options.steps)]
        subprocess.run([*launch, __file__, *arguments], check=True, env=environment)


if __name__ == "__main__":
    main()
