"""Whether more devices are ever slower for the same batch: ``python benchmarks/more_devices.py [--model NAME ...]``.

Each model is planned on 1 to 64 H100s with the same batch.  A plan leaves no devices idle, but may replicate on all of
them what fewer devices compute, so it should never be slower by more than its printed gap.  Shapes only, on the meta
device; estimated prices; nothing is measured, and figures are predictions.  ``slower`` is relative to the fastest plan
on fewer devices; seconds of pipelines are increased by the error of predictions, as searches compare them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

CLUSTERS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))
"""Nodes, and devices of each."""

Model = tuple[nn.Module, dict[str, torch.Tensor]]


class Layers(nn.Module):
    """Linear layers whose steps are so short that launches and latencies decide."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of the last layer's outputs."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def make_mlp() -> Model:
    """6 layers of 2,048 features, 64 rows."""
    return Layers(6, 2048), {"x": torch.zeros(64, 2048)}


def make_vit() -> Model:
    """4 layers of ViT-B, 64 images."""
    import transformers  # noqa: PLC0415  (a second, which --help does not need)

    config = transformers.ViTConfig(num_hidden_layers=4, dtype="bfloat16", num_labels=1000)
    images = torch.zeros(64, 3, 224, 224, dtype=torch.bfloat16)
    model = transformers.ViTForImageClassification(config).to(torch.bfloat16)
    return model, {"pixel_values": images, "labels": torch.zeros(64, dtype=torch.int64)}


def make_llama() -> Model:
    """4 layers of 1,024 features, 64 rows of 512 tokens."""
    import transformers  # noqa: PLC0415

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        dtype="bfloat16",
    )  # fmt: skip
    ids = torch.zeros(64, 512, dtype=torch.int64)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16), {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], Model]] = {"mlp": make_mlp, "vit": make_vit, "llama": make_llama}


def run(name: str) -> None:
    """Print a line for each cluster."""
    from autopar.cluster import Cluster  # noqa: PLC0415
    from autopar.cost import ClusterPrices  # noqa: PLC0415
    from autopar.lower.run.schedule_lists import schedule_actions  # noqa: PLC0415
    from autopar.planning.call_traces import trace_model  # noqa: PLC0415
    from autopar.search import SearchRequest, search  # noqa: PLC0415
    from autopar.search.plan_selection import preferred_s  # noqa: PLC0415

    with torch.device("meta"):
        model, inputs = MODELS[name]()
    program = trace_model(model, inputs).program
    best_s = float("inf")
    print(f"{name}: {MODELS[name].__doc__}")
    for nodes, devices in CLUSTERS:
        started_s = time.process_time()
        prices = ClusterPrices(Cluster.of("h100", nodes=nodes, devices_per_node=devices))
        plan = search(program, nodes * devices, prices, SearchRequest(schedules=schedule_actions))
        took_s = time.process_time() - started_s
        slower = max(0.0, preferred_s(plan) / best_s - 1)
        best_s = min(best_s, preferred_s(plan))
        strategy = plan.strategies[plan.layers[len(plan.layers) // 2].strategy]
        stages = f"{len(plan.stages)} stages, " if plan.stages else ""
        print(
            f"  {nodes * devices:3} devices {plan.step_time_s * 1e3:9.4f} ms  slower {slower:6.2%}  gap "
            f"{plan.optimality_gap:5.1%} {took_s:5.1f} CPU s  {stages}{strategy.axes}, zero={strategy.zero}",
            flush=True,
        )


def main() -> None:
    """Plan the models on all clusters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=list(MODELS), choices=list(MODELS))
    for name in parser.parse_args().model:
        run(name)


if __name__ == "__main__":
    main()
