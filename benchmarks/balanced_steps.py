"""Steps on real text, balanced by a family of plans against the best plan for the longest rows, in one run on gloo.

    torchrun --standalone --nproc-per-node 4 -m autopar.profile --output profile.json
    torchrun --standalone --nproc-per-node 4 benchmarks/balanced_steps.py --profile profile.json [--steps 20] [--json]

Documents are what blank lines separate in the Python standard library's files, byte by byte; a step has as many as fill
`--rows` rows of `--tokens` bytes on average.  Both models train on the same batches by turns, first one and then the
other, so that what else the machine does slows both.  Neither has pipeline stages, beside which there are no groups.

For each plan or groups that balanced steps ran by, and for all steps, three ratios of static to balanced are printed:
as predicted of these very batches; of CPU seconds of the rank that computes most, which is what a step takes where each
rank has a core to itself and nothing else is waited for; and of seconds, which depend on what shares the cores.  The
prediction's error is how far those CPU seconds are from predicted seconds: the mean over steps, and the range.  What
balancing gains should be "at least" the predicted ratio less the mean absolute error of steps of both models.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.balance import BatchPlanner, Lengths
from autopar.plan.prediction import LengthPrediction


class Step(NamedTuple):
    """A step of one of the two models, in seconds: as predicted, on the clock, and of the rank that computes most."""

    predicted_s: float
    wall_s: float
    cpu_s: float


def read_documents(most: int) -> list[dict[str, Tensor]]:
    """In a random order; what is longer than `most` bytes is cut."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text[:most] for path in sources for text in path.read_bytes().split(b"\n\n") if len(text) > 1]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))
    tokens = [torch.tensor(list(texts[index])) for index in order.tolist()]
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def planners_of(plan: autopar.Plan) -> tuple[BatchPlanner, BatchPlanner]:
    """What shares batches out by the best plan for the longest rows alone, and by the whole family, at its prices."""
    static = replace(plan.prediction, row=plan.prediction.lengths.static, lengths=LengthPrediction())
    return BatchPlanner(replace(plan, prediction=static)), BatchPlanner(plan)


def train_step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> tuple[float, float, float]:
    """Seconds of a step, the largest CPU seconds of a rank, and the loss."""
    dist.barrier()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    spent = torch.tensor([time.perf_counter() - began_s, time.process_time() - cpu_s], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    wall_s, most_s = spent.tolist()
    return wall_s, most_s, loss.item()


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2, help="that the documents of a step fill")
    parser.add_argument("--tokens", type=int, default=2048, help="of a row, and the longest document")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--profile", help="of this machine; without it what parallelize measures")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    documents = read_documents(arguments.tokens)
    lengths = [len(each["input_ids"]) for each in documents]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = LlamaConfig(vocab_size=256, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
                         num_hidden_layers=4, num_attention_heads=8, use_cache=False)  # fmt: skip
    ids = torch.zeros(arguments.rows, arguments.tokens, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(arguments.tokens).expand_as(ids)}
    models: list[Any] = []
    for distribution in (None, Lengths.of(lengths)):
        torch.manual_seed(0)
        expected: Any = {"lengths": distribution} if distribution else {"documents": Lengths.of(lengths)}
        models.append(autopar.parallelize(LlamaForCausalLM(config), mesh, example, inputs="local",
                                          profile=arguments.profile, constraints="pipeline=1", **expected))  # fmt: skip
    planners = planners_of(models[1].plan)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    size = models[1].plan.prediction.lengths.sequences
    loaders = [
        autopar.balanced(DataLoader(documents, batch_size=size), model, length_index=lengths, shifts="labels")
        for model in models
    ]
    ran: dict[str, list[tuple[Step, Step]]] = {}
    apart = 0.0
    for is_timed in (False, True):  # forms of calls are planned and lowered when they first come
        for number, batches in zip(range(arguments.steps), zip(*loaders, strict=True), strict=False):
            found = [train_step(*each) for each in zip(models, optimizers, batches, strict=True)]
            apart = max(apart, abs(found[0][2] / found[1][2] - 1))
            if is_timed:
                assigned = [planner.assign(lengths[number * size :][:size]) for planner in planners]
                both = [Step(each.step_time_s, *own[:2]) for each, own in zip(assigned, found, strict=True)]
                ran.setdefault(assigned[1].runs_as, []).append((both[0], both[1]))
    if dist.get_rank() == 0:
        report(models, ran, apart, as_json=arguments.json)
    dist.destroy_process_group()


def compare(steps: Sequence[tuple[Step, Step]]) -> dict[str, float]:
    """The three ratios of these steps, static to balanced, and the error of what was predicted of each."""
    numbers = torch.tensor(steps, dtype=torch.float64)  # [steps, 2, 3]
    predicted, seconds, cpu = (numbers[:, 0].sum(0) / numbers[:, 1].sum(0)).tolist()
    errors = numbers[:, :, 2] / numbers[:, :, 0]
    least = predicted * (1 - float((errors - 1).abs().mean()))
    found: dict[str, float] = {
        "steps": len(steps),
        "predicted": predicted,
        "at least": least,
        "of CPU": cpu,
        "of seconds": seconds,
    }
    for name, own in zip(("static", "balanced"), errors.unbind(1), strict=True):
        found[f"{name} CPU / predicted"] = float(own.mean())
        if len(own) > 1:
            found[f"{name} from"], found[f"{name} to"] = float(own.min()), float(own.max())
    return found


def report(models: list[Any], ran: dict[str, list[tuple[Step, Step]]], apart: float, *, as_json: bool) -> None:
    """`ran`: by what balanced steps ran, each static and balanced."""
    expected = models[1].plan.prediction.lengths
    steps = {"all": [step for found in ran.values() for step in found], **ran}
    table = {name: compare(found) for name, found in steps.items()}
    of_mean = {"expected of drawn batches": expected.static_s / expected.step_time_s,
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
