"""Steps on real text, balanced by a family of plans against the best plan for the longest rows, in one run on gloo.

    torchrun --standalone --nproc-per-node 4 benchmarks/balanced_steps.py [--steps 20] [--tokens 2048] [--json]

Documents are what blank lines separate in the Python standard library's files, byte by byte.  Both models train on the
same batches by turns, first one and then the other, so that what else the machine does slows both.  Printed are
seconds of a step and their ratio, for each plan or groups that balanced steps ran by and for all, beside the ratio
that the plan expects; and the ratio of CPU seconds of all ranks, which tells work apart from waiting where ranks share
cores.  Neither has pipeline stages, beside which there are no groups.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.balance import BatchPlanner, Lengths


def read_documents(most: int) -> list[dict[str, Tensor]]:
    """In a random order; what is longer than `most` bytes is cut."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text[:most] for path in sources for text in path.read_bytes().split(b"\n\n") if len(text) > 1]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    tokens = [torch.tensor(list(texts[index])) for index in order.tolist()]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def describe(plan: autopar.Plan, lengths: list[int]) -> str:
    """What a batch of these lengths runs as."""
    found = BatchPlanner(plan).assign(lengths)
    if not found.unlike:
        return f"rows of {found.row_cost.tokens}"
    kinds = Counter((each.degree, each.tokens) for each in found.unlike)
    return "groups of " + " + ".join(f"{count} x {degree} ({tokens})" for (degree, tokens), count in kinds.items())


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> tuple[float, float, float]:
    """Seconds of a step, CPU seconds of all ranks, and the loss."""
    dist.barrier()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    spent = torch.tensor(time.process_time() - cpu_s, dtype=torch.float64)
    dist.all_reduce(spent)
    return time.perf_counter() - began_s, float(spent), loss.item()


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="documents of a step")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row, and the longest document")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    documents = read_documents(arguments.tokens)
    lengths = [len(each["input_ids"]) for each in documents]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = LlamaConfig(vocab_size=256, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
                         num_hidden_layers=4, num_attention_heads=8, use_cache=False)  # fmt: skip
    rows = max(1, math.ceil(arguments.batch_size * sum(lengths) / len(lengths) / arguments.tokens))
    ids = torch.zeros(rows, arguments.tokens, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(arguments.tokens).expand_as(ids)}
    models: list[Any] = []
    for distribution in (None, Lengths.of(lengths)):
        torch.manual_seed(0)
        expected: Any = {"lengths": distribution} if distribution else {"documents": Lengths.of(lengths)}
        model = LlamaForCausalLM(config)
        models.append(autopar.parallelize(model, mesh, example, inputs="local", constraints="pipeline=1", **expected))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    loader = DataLoader(documents, batch_size=arguments.batch_size)
    loaders = [autopar.balanced(loader, model, length_index=lengths, shifts="labels") for model in models]
    ran: dict[str, list[Tensor]] = {}
    apart = 0.0
    for is_timed in (False, True):  # forms of calls are planned and lowered when they first come
        turns = zip(range(arguments.steps), zip(*loaders, strict=True), strict=False)
        for step, batches in turns:
            found = [train_step(*each) for each in zip(models, optimizers, batches, strict=True)]
            apart = max(apart, abs(found[0][2] / found[1][2] - 1))
            if is_timed:
                own = lengths[step * arguments.batch_size :][: arguments.batch_size]
                numbers = torch.tensor([each[:2] for each in found], dtype=torch.float64)
                ran.setdefault(describe(models[1].plan, own), []).append(numbers)
    if dist.get_rank() == 0:
        report(models, ran, apart, as_json=arguments.json)
    dist.destroy_process_group()


def report(models: list[Any], ran: dict[str, list[Tensor]], apart: float, *, as_json: bool) -> None:
    """`ran`: by what balanced steps ran, of each ``[static or balanced, seconds or CPU seconds]``."""
    expected = models[1].plan.prediction.lengths
    steps = {"all": [step for found in ran.values() for step in found], **ran}
    table: dict[str, dict[str, float]] = {}
    for name, found in steps.items():
        (static_s, static_cpu_s), (own_s, own_cpu_s) = torch.stack(found).mean(0).tolist()
        table[name] = {"steps": len(found), "static s": static_s, "balanced s": own_s, "ratio": static_s / own_s,
                       "ratio of CPU s": static_cpu_s / own_cpu_s}  # fmt: skip
    of_mean = {"expected ratio": expected.static_s / expected.step_time_s,
               "its standard error": expected.standard_error_s / expected.step_time_s,
               "losses apart": apart}  # fmt: skip
    if as_json:
        print(json.dumps({"steps": table, **of_mean}))
        return
    print(f"{models[1].plan}\nstatic: {models[0].plan.headline}")
    for name, row in (table | {"": of_mean}).items():
        print(f"{name:30}", ", ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
