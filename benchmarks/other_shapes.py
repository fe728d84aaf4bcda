"""What calls of other shapes cost when they first come: tracing and planning, without lowering.

    python benchmarks/other_shapes.py [--layers 32] [--devices 64]

CPU seconds of this process, for LLaMA-3-8B on H100s (estimated prices) and for a model of two small layers.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from importlib.metadata import version

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.planning.arguments import training_spec
from autopar.planning.building import call_planner
from autopar.planning.call_traces import trace_model
from autopar.planning.setup import Setup

_SHAPES = {"planned for": (64, 8192), "half the batch": (32, 8192), "half the length": (64, 4096),
           "a batch that doesn't divide": (63, 8192)}  # fmt: skip


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids, which are their own labels; only shapes matter."""
    ids = torch.zeros(rows, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def measure(name: str, config: LlamaConfig, devices: int, shrink: int) -> None:
    """Plan one model, then calls of the other shapes; print CPU seconds of each."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    cluster = Cluster.of("h100", devices_per_node=min(8, devices), nodes=max(1, devices // 8))
    prices = ClusterPrices(cluster, None)
    setup = Setup(training=training_spec(model, "adamw")).priced(prices)
    planner = None
    for what, (rows, length) in _SHAPES.items():
        inputs = batch(rows, length // shrink)
        started_s = time.process_time()
        if planner is None:
            plan = autopar.plan(model, cluster, inputs)
            planned_s = time.process_time() - started_s
            planner = call_planner(model, trace_model(model, inputs), plan, setup)
        else:
            plan = planner((), inputs, True).plan
            planned_s = time.process_time() - started_s
        print(f"{name:12} {what:28} {rows:3} x {length // shrink:4}: {planned_s:6.2f} CPU s; {plan.strategies[0].axes}")


def main() -> None:
    """Both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--devices", type=int, default=64)
    given = parser.parse_args()
    versions = f"autopar {version('autopar')}, torch {version('torch')}, Python {platform.python_version()}"
    print(f"# {' '.join(sys.argv)}: {versions}")
    small = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, vocab_size=256)  # fmt: skip
    large = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=given.layers,
                        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)  # fmt: skip
    measure("two layers", small, 8, 64)
    measure("LLaMA-3-8B", large, given.devices, 1)


if __name__ == "__main__":
    main()
