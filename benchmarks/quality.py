"""How good plans are: the free choice beside a grid of usual configurations, and beside what others published.

    python benchmarks/quality.py [--case NAME ...] [--grid 0 | 1 | 2] [--eager | --either] [--json FILE]

Each row is one model on one cluster.  Its plan is searched for freely, then once for every configuration of the grid
(`GRID`: degrees, ZeRO levels, recomputation, microbatches, schedules), forced by constraints.  All are priced by the
same model, so the first must never be slower than any of the others by more than its printed gap.  ``published`` is
what was measured by others for that model, number of devices and global batch, with the source's row.  Estimated
prices; nothing is measured here, and figures of ours are predictions.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from autopar import Plan

LLAMAS = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
"""LLaMA 3.1: 8 heads of keys and values, 128,256 tokens (https://huggingface.co/meta-llama, config.json)."""


@dataclass(frozen=True)
class Case:
    """One model on one cluster; `published` is tokens (images, clips) per second and device, and where it stands."""

    model: str
    device: str
    nodes: int
    batch: int
    published: float = 0.0
    source: str = ""
    devices_per_node: int = 8
    length: int = 8192

    @property
    def world_size(self) -> int:
        """Devices."""
        return self.nodes * self.devices_per_node


# Rows of benchmarks/published (throughput.csv, and those of the folder `unseen`).
CASES = {
    "8b-8": Case("8b", "h100", 1, 128, 10253.5, "DGXX-002-8"),
    "8b-64": Case("8b", "h100", 8, 1024, 10630.3, "DGX-109"),
    "8b-256": Case("8b", "h100", 32, 2048, 10630.3, "DGX-110, of 128 devices"),
    "8b-64-a100": Case("8b", "a100", 8, 64, 2973, "TTH-002"),
    "8b-8-b200": Case("8b", "b200", 1, 128),
    "70b-64": Case("70b", "h100", 8, 128, 1121.4, "DGX-011"),
    "70b-256": Case("70b", "h100", 32, 512, 1113.0, "DGX-013"),
    "70b-512": Case("70b", "h100", 64, 1024, 1107.0, "DGXX-013-512"),
    "70b-64-a100": Case("70b", "a100", 8, 64, 331, "TTH-003"),
    "405b-512": Case("405b", "h100", 64, 256, 207.1, "DGX-131"),
    "405b-1024": Case("405b", "h100", 128, 512, 206.5, "DGX-132"),
    "405b-16384": Case("405b", "h100", 2048, 2048, 158.0, "LLAMA3-2"),
    "gpt3-256": Case("gpt3", "a100", 32, 768, 153.6, "MSC-256"),
    "gpt3-1024": Case("gpt3", "a100", 128, 2048, 107.11, "NML22-175B-128"),
    "gpt3-256-h100": Case("gpt3", "h100", 32, 1536, 408.0, "PAX-b4"),
    "mixtral-64": Case("mixtral", "h100", 8, 256, 5643.47, "MCMOE-0.9"),
    "qwen3-8": Case("qwen3", "h100", 1, 512, 12040, "AUTO-Q30B"),
    "qwen3-16": Case("qwen3", "h100", 2, 512),
    "deepseek-256": Case("deepseek", "h100", 32, 2048),
    "deepseek-2048": Case("deepseek", "h100", 256, 15360, 1543, "arXiv:2412.19437, section 1; H800, FP8"),
    "8b-128k-8": Case("8b", "h100", 1, 8, length=1 << 17),
    "8b-128k-64": Case("8b", "h100", 8, 8, length=1 << 17),
    "8b-128k-256": Case("8b", "h100", 32, 32, length=1 << 17),
    "8b-1m-64": Case("8b", "h100", 8, 1, length=1 << 20),
    "8b-1m-256": Case("8b", "h100", 32, 4, length=1 << 20),
    "vit-g-64": Case("vit-g", "a100", 8, 4096),
}

SINGLE = (
    "pipeline=1", "pipeline=2", "pipeline=4", "pipeline=8", "pipeline=16",
    "tensor=1", "tensor=2", "tensor=4", "tensor=8", "zero=0", "zero=1", "zero=2", "zero=3",
    "recompute=none", "recompute=selective", "recompute=full",
    "schedule=1f1b", "schedule=interleaved_1f1b", "schedule=interleaved_zero_bubble", "schedule=zbv",
    "microbatches=4", "microbatches=8", "microbatches=16", "microbatches=32",
)  # fmt: skip
DOUBLE = (
    *(f"tensor={tensor} pipeline={groups}" for tensor in (1, 2, 4, 8) for groups in (1, 2, 4, 8, 16)),
    *(f"pipeline=1 zero={level}" for level in (1, 3)), "tensor=8 pipeline=8 schedule=1f1b",
    "tensor=8 pipeline=8 schedule=interleaved_1f1b", "tensor=4 pipeline=4 schedule=interleaved_1f1b",
)  # fmt: skip
GRID = ((), SINGLE, SINGLE + DOUBLE)
OF_EXPERTS = (
    "expert=4", "expert=8", "expert=8 zero=1", "expert=8 zero=3", "expert=8 pipeline=2", "expert=8 pipeline=4",
    "expert=8 pipeline=8", "expert=1",
)  # fmt: skip
"""Behind those of a grid, for models with experts."""
OF_MANY_EXPERTS = (
    "expert=16", "expert=32", "expert=64", "expert=64 pipeline=8", "expert=64 pipeline=16",
    "expert=8 pipeline=16 microbatches=120",
)  # fmt: skip
"""Behind those, for DeepSeek-V3; the last is a microbatch with a row for each device of 15,360 rows on 2048."""
OF_LONG_ROWS = ("context=8", "context=4 tensor=2", "context=2 tensor=4", "sequence=8", "tensor=8")
"""Behind those of a grid, for rows of more than 8,192 tokens."""


@dataclass(frozen=True)
class Row:
    """What a search found; without seconds, why it found nothing."""

    constraints: str
    step_s: float = 0.0
    rate: float = 0.0
    gap: float = 0.0
    peak_gib: float = 0.0
    search_cpu_s: float = 0.0
    what: str = ""
    problem: str = ""


def describe(plan: Plan) -> str:
    """A plan in one line."""
    index, _ = Counter(layer.strategy for layer in plan.layers).most_common(1)[0]
    strategy = plan.strategies[index]
    stages = f"{plan.schedule}, {len(plan.stages)} stages on {plan.num_groups} groups, " if plan.stages else ""
    return (
        f"{stages}{plan.num_microbatches} microbatches, {strategy.axes}, zero={strategy.zero}, "
        f"recompute={strategy.recompute}"
    )


def make_model(name: str, batch: int, length: int = 8192) -> tuple[torch.nn.Module, dict[str, torch.Tensor], int]:
    """The model on the meta device in bfloat16, its global batch, and the units (tokens, images) of a row."""
    import transformers  # noqa: PLC0415  (a second, which --help does not need)

    def tokens(length: int) -> tuple[dict[str, torch.Tensor], int]:
        ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": ids}, length

    with torch.device("meta"):
        if name in LLAMAS:
            config = transformers.LlamaConfig(
                vocab_size=128256,
                num_key_value_heads=8,
                max_position_embeddings=length,
                dtype="bfloat16",
                **LLAMAS[name],
            )
            return transformers.LlamaForCausalLM(config).to(torch.bfloat16), *tokens(length)
        if name == "gpt3":  # Brown et al. 2020, table 2.1
            config = transformers.GPT2Config(
                vocab_size=51200, n_positions=2048, n_embd=12288, n_layer=96, n_head=96, dtype="bfloat16",
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config).to(torch.bfloat16), *tokens(2048)
        if name == "mixtral":
            config = transformers.MixtralConfig(dtype="bfloat16", max_position_embeddings=4096)
            return transformers.MixtralForCausalLM(config).to(torch.bfloat16), *tokens(4096)
        if name == "qwen3":  # https://huggingface.co/Qwen/Qwen3-30B-A3B, config.json
            config = transformers.Qwen3MoeConfig(
                dtype="bfloat16", hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, vocab_size=151936,
                num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, norm_topk_prob=True,
            )  # fmt: skip
            return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16), *tokens(4096)
        if name == "deepseek":  # its configuration is the default one
            config = transformers.DeepseekV3Config(dtype="bfloat16")
            return transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16), *tokens(4096)
        if name == "vit-g":  # Zhai et al. 2022, table 2
            config = transformers.ViTConfig(
                hidden_size=1408, intermediate_size=6144, num_hidden_layers=40, num_attention_heads=16, patch_size=14,
                dtype="bfloat16", num_labels=1000,
            )  # fmt: skip
            images = torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16)
            labels = torch.zeros(batch, dtype=torch.int64)
            model = transformers.ViTForImageClassification(config).to(torch.bfloat16)
            return model, {"pixel_values": images, "labels": labels}, 1
        raise ValueError(f"no model {name!r}")


def _solver(case: Case, compiled: bool | None) -> Callable[[str], Row]:
    """Searches one case, with layers compiled or not, or (None) as is faster; the model is traced once."""
    from autopar.cluster import Cluster  # noqa: PLC0415
    from autopar.cost import ClusterPrices  # noqa: PLC0415
    from autopar.errors import AutoparError  # noqa: PLC0415
    from autopar.lower.run.schedule_lists import schedule_actions  # noqa: PLC0415
    from autopar.planning.arguments import training_spec  # noqa: PLC0415
    from autopar.planning.call_traces import trace_model  # noqa: PLC0415
    from autopar.planning.logits import search_plan  # noqa: PLC0415
    from autopar.search import MEMORY_ERROR, SearchRequest, search  # noqa: PLC0415

    model, inputs, units = make_model(case.model, case.batch, case.length)
    program = trace_model(model, inputs).program
    cluster = Cluster.of(case.device, nodes=case.nodes, devices_per_node=case.devices_per_node)
    prices = ClusterPrices(cluster, None)
    training = training_spec(model, "adamw").on_device(cluster.device.name)

    def solve(text: str) -> Row:
        started_s = time.process_time()
        request = SearchRequest(
            None, training, tuple(text.split()), schedules=schedule_actions, memory_error=MEMORY_ERROR
        )
        try:
            plan = search_plan(
                compiled, lambda own, each: search(own, case.world_size, prices, each), program, prices, request,
                case.world_size,
            )  # fmt: skip
        except AutoparError as error:
            return Row(text or "free", problem=f"{type(error).__name__}: {str(error).split('. ')[0]:.120}")
        rate = case.batch * units / plan.step_time_s / case.world_size
        peak_gib = plan.peak_memory_bytes / 2**30
        took_s = time.process_time() - started_s
        return Row(text or "free", plan.step_time_s, rate, plan.optimality_gap, peak_gib, took_s, describe(plan))

    return solve


def run_case(name: str, compiled: bool | None, grid: int, more: Sequence[str]) -> Iterator[Row]:
    """The free choice, then those of the grid."""
    solve = _solver(CASES[name], compiled)
    own = OF_EXPERTS if grid and CASES[name].model in ("mixtral", "qwen3", "deepseek") else ()
    own += OF_MANY_EXPERTS if grid and CASES[name].model == "deepseek" else ()
    own += OF_LONG_ROWS if grid and CASES[name].length > 8192 else ()
    for text in ("", *GRID[grid], *own, *more):
        yield solve(text)


def show(row: Row, free: Row | None) -> str:
    """One line of the table."""
    if row.problem:
        return f"  {row.constraints:45} {row.problem}"
    ratio = f"{free.step_s / row.step_s:6.3f}" if free and free.step_s else "      "
    return (
        f"  {row.constraints:45} {ratio} {row.step_s:8.3f} s {row.rate:9.1f}/s gap {row.gap:5.1%} "
        f"{row.peak_gib:5.1f} GiB {row.search_cpu_s:5.1f} CPU s  {row.what}"
    )


def main() -> None:
    """Run the cases, one process each, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--grid", type=int, default=2, choices=range(len(GRID)))
    parser.add_argument("--also", nargs="*", default=[], help="further constraints, such as 'tensor=8 pipeline=16'")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--eager", action="store_true", help="layers are not compiled (by default they are)")
    ways.add_argument("--either", action="store_true", help="the search chooses, as it does for users unasked")
    parser.add_argument("--json", type=Path, help="a file to add a line to for each row")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.in_process:
        print(f"# {' '.join(sys.argv)}: torch {torch.__version__}, {platform.processor() or platform.machine()}")
    for name in options.case:
        if not options.in_process:
            own = [argument for argument in sys.argv[1:] if argument not in CASES and argument != "--case"]
            subprocess.run([sys.executable, __file__, *own, "--case", name, "--in-process"], check=False)
            continue
        case = CASES[name]
        told = f"published {case.published:.1f}/s ({case.source})" if case.published else "nothing published"
        print(f"{name}: {case.model}, {case.world_size} x {case.device}, batch {case.batch}; {told}")
        free: Row | None = None
        for row in run_case(name, None if options.either else not options.eager, options.grid, options.also):
            free = free or row
            print(show(row, free), flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({"case": name, **asdict(row)}) + "\n")


if __name__ == "__main__":
    main()
