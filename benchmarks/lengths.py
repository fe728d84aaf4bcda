"""How even the work of devices is when sequences have many lengths, and what sharing them out costs.

    python benchmarks/lengths.py [--lengths FILE] [--context 131072] [--models 6.7B 13B 30B] [--json]

(a) LLaMA 7B on 64 H100s: largest / mean work of data-parallel ranks, attention and linear work of tokens, by the prices
    of the plan that the search finds (estimates), with documents packed into rows as they come, and assigned over
    1 to 8 batches.
(b) FlexSP's setting (arXiv 2412.01523): LLaMA on 64 A100s with 40 GB, batches of 512 sequences of up to 192k and 384k
    tokens, ZeRO-3. Step time of groups of several degrees in one step, predicted, against the best single degree for
    all batches and against the best degree for each, beside what FlexSP measured. For each degree the search finds a
    plan for rows of `DEVICE_TOKENS` tokens a device; a group computes its sequences one after the other, what is once
    a step is that of the slowest degree. No runtime of ours runs such groups: these are predictions. It takes minutes.
(c) Video clips on 32 GPUs, the joint mix of KnapFormer (commit efda11b): each GPU its own clips as they come, and clips
    assigned to groups of 1 to 8 GPUs. Work is in floating-point operations of a transformer of 57 blocks, width 3072;
    communication within groups counts nothing.
(d) CPU milliseconds of one assignment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.balance import Assignment, BatchPlanner, Clip, Lengths
from autopar.balance.groups import best_groups
from autopar.errors import AutoparError
from autopar.plan import Decisions, Plan
from autopar.prediction import Prediction, RowCost

ROWS = 8  # of a batch: one for each data-parallel rank, if the plan has eight
DRAWS = 20  # batches, and mixes, whose mean is shown
WIDTH, BLOCKS = 3072, 57
# GPUs, clips on each, clip: tokens are those of README.md in the folder of lengths.
MIX = [
    (8, 4, Clip(1, 256, 256)), (2, 5, Clip(1, 512, 512)), (2, 5, Clip(1, 1024, 1024)), (4, 1, Clip(1, 2048, 2048)),
    (1, 10, Clip(4, 256, 256, (3.4, 16, 16))), (3, 1, Clip(4, 512, 512, (3.4, 16, 16))),
    (8, 2, Clip(85, 256, 256, (3.4, 16, 16))), (4, 1, Clip(85, 512, 512, (3.4, 16, 16))),
]  # fmt: skip
MOST_TEXT = 392
DEVICE_TOKENS = 6144  # of a microbatch: 192k tokens are then a row of 32 devices, 384k of 64
# Hidden size, that of the feed-forward, layers, heads.
LLAMAS = {"6.7B": (4096, 11008, 32, 32), "13B": (5120, 13824, 40, 40), "30B": (6656, 17920, 60, 52)}
# Speedup over the best static degree, and over one degree for each batch: README.md in the folder of lengths.
PUBLISHED = {
    ("6.7B", 196608): (1.72, 1.34), ("6.7B", 393216): (1.46, 1.32), ("13B", 196608): (1.59, 1.31),
    ("13B", 393216): (1.43, 1.21), ("30B", 196608): (1.64, 1.23), ("30B", 393216): (1.53, 1.18),
}  # fmt: skip


def plan_of_context(context: int) -> Plan:
    """LLaMA 7B, `ROWS` sequences of `context` tokens, 64 H100s."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                         vocab_size=32000, max_position_embeddings=context)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(ROWS, context, dtype=torch.int64, device="meta")
    cluster = autopar.Cluster.of("h100", devices_per_node=8, nodes=8)
    return autopar.plan(model, cluster, {"input_ids": ids, "labels": ids})


def plans_of_degrees(name: str) -> list[Plan]:
    """A plan for each number of devices that share a sequence, of the 64."""
    hidden, ffn, layers, heads = LLAMAS[name]
    plans: list[Plan] = []
    for degree in (1, 2, 4, 8, 16, 32, 64):
        tokens = DEVICE_TOKENS * degree
        config = LlamaConfig(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, use_cache=False,
                             num_attention_heads=heads, vocab_size=32000, max_position_embeddings=tokens)  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        ids = torch.zeros(64 // degree, tokens, dtype=torch.int64, device="meta")
        cluster = autopar.Cluster.of("a100-40gb", devices_per_node=8, nodes=8)
        constraints = ("zero=3", f"data={64 // degree}") if degree < 64 else ("zero=3",)
        try:
            plan = autopar.plan(model, cluster, {"input_ids": ids, "labels": ids}, precision="bf16", compile=False,
                                constraints=constraints)  # fmt: skip
        except AutoparError as error:
            print(f"{name}, {degree} devices a sequence: {error}", file=sys.stderr)
            continue
        if plan.prediction.row.ranks == 64 // degree:  # else attention is split otherwise than asked for
            plans.append(plan)
        print(f"{name}, {degree} devices a sequence: {plan.headline}", file=sys.stderr)
    return plans


def measure_groups(name: str, context: int, plans: list[Plan], lengths: Lengths) -> dict[str, float]:
    """(b): seconds of a step, and how many times as long it is without groups of several degrees."""
    planner = BatchPlanner(plans)
    once_s = {64 // plan.prediction.row.ranks: plan.prediction.row.step_s for plan in plans}
    random = np.random.default_rng(0)
    times: list[list[float]] = []  # of each batch: by groups of several degrees, then by each degree alone
    for _ in range(DRAWS):
        tokens = lengths.clipped(context).draw(512, random)
        found = planner.assign(tokens)
        times.append([found.largest_s + max(once_s[int(degree)] for degree in found.degrees)])
        for cost in planner.costs:
            fits = tokens.max() <= cost.tokens
            load = best_groups([cost], 64, tokens)[1].load if fits else np.array([np.inf])
            times[-1].append(float(load.max()) + once_s[cost.degree])
    table = np.array(times)
    holds = [index for index, cost in enumerate(planner.costs, 1) if cost.tokens >= context]
    static_s = table[:, holds].mean(axis=0).min()
    groups_s, each_s = table[:, 0].mean(), table[:, 1:].min(axis=1).mean()
    published = PUBLISHED[name, context]
    return {
        "groups: s of a step": float(groups_s), "/ best static": float(static_s / groups_s),
        "/ best static, published": published[0], "/ one plan a batch": float(each_s / groups_s),
        "/ one plan a batch, published": published[1],
    }  # fmt: skip


def documents(lengths: Lengths, tokens: int, random: np.random.Generator) -> np.ndarray:
    """Lengths of documents in the order of the data: as many as have no more than so many tokens."""
    drawn = lengths.draw(int(2 * tokens / lengths.mean) + 16, random)
    return drawn[: int(np.searchsorted(drawn.cumsum(), tokens, side="right"))]


def as_it_comes(tokens: np.ndarray, row: RowCost) -> float:
    """Largest / mean work with documents in rows in their order, and rows on ranks by turns."""
    rows: list[list[int]] = [[]]
    for length in tokens.tolist():
        if sum(rows[-1]) + length > row.tokens:
            rows.append([])
        rows[-1].append(length)
    work = np.zeros(row.ranks)
    for number, own in enumerate(rows):
        work[number % row.ranks] += row.token_s * sum(own) + row.pair_s * sum(n * n for n in own)
    return float(work.max() / work.mean())


def step_imbalance(assignment: Assignment, row: RowCost) -> float:
    """Largest work of each step / mean work, linear work of tokens included, over all steps of an assignment."""
    groups = len(assignment.degrees)
    tokens = np.bincount(assignment.group, weights=assignment.lengths, minlength=groups)
    work = (row.token_s * tokens + assignment.work_s).reshape(-1, row.ranks)
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())


def measure_text(plan: Plan, lengths: Lengths) -> dict[str, float]:
    """(a): of batches that fill nine tenths of the rows, the mean of largest / mean work."""
    row, planner = plan.prediction.row, BatchPlanner(plan)
    full = int(0.9 * row.ranks * row.rows * row.tokens)
    found: dict[str, list[float]] = {}
    for seed in range(DRAWS):
        for batches in (1, 2, 4, 8):
            tokens = np.concatenate([
                documents(lengths, full, np.random.default_rng([seed, number])) for number in range(batches)
            ])  # fmt: skip
            if batches == 1:
                found.setdefault("as it comes", []).append(as_it_comes(tokens, row))
            assignment = planner.assign(tokens, batches=batches)
            found.setdefault(f"assigned over {batches}", []).append(step_imbalance(assignment, row))
    return {name: float(np.mean(each)) for name, each in found.items()}


def plan_of_degree(degree: int, devices: int) -> Plan:
    """Clips on `degree` of these devices together, priced in floating-point operations."""
    token, pair = 24.0 * WIDTH**2 * BLOCKS / degree, 4.0 * WIDTH * BLOCKS / degree
    row = RowCost(devices // degree, 1, 1 << 20, token, pair)
    return Plan(Decisions("", devices, 1, (), (), (), ()), Prediction(row=row))


def measure_clips() -> dict[str, float]:
    """(c): the mean, before, and the mean and largest after, of largest / mean work of a GPU."""
    planner = BatchPlanner([plan_of_degree(degree, 32) for degree in (1, 2, 4, 8)])
    alone = next(cost for cost in planner.costs if cost.degree == 1)
    before, after = [], []
    for seed in range(DRAWS):
        random = np.random.default_rng(seed)
        gpus = [
            [clip.tokens + int(random.integers(0, MOST_TEXT + 1)) for _ in range(count)]
            for number, count, clip in MIX
            for _ in range(number)
        ]
        own = np.array([alone.seconds(np.array(each)).sum() for each in gpus])
        before.append(float(own.max() / own.mean()))
        found = planner.assign([n for each in gpus for n in each])
        after.append(found.largest_s * 32 / float(own.sum()))  # devices that no group has count as waiting
    return {"before": float(np.mean(before)), "after": float(np.mean(after)), "largest after": max(after)}


def measure_cost(plan: Plan, lengths: Lengths) -> dict[str, float]:
    """(d): CPU milliseconds of one assignment."""
    found: dict[str, float] = {}
    for count, ranks in ((512, 64), (10_000, 4096)):
        row = replace(plan.prediction.row, ranks=ranks)
        planner = BatchPlanner(Plan(replace(plan.decisions, world_size=ranks), Prediction(row=row)))
        tokens = lengths.draw(count, 0)
        planner.assign(tokens)
        times = []
        for _ in range(5):
            started_s = time.process_time()
            planner.assign(tokens)
            times.append(time.process_time() - started_s)
        found[f"{count} sequences, {ranks} ranks"] = 1e3 * float(np.median(times))
    return found


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", help="a file of lengths, or of the columns quantile and tokens")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument(
        "--models", nargs="*", default=[], choices=list(LLAMAS), help="of (b), which takes minutes each"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    # Without a file: what fits Wikipedia's body.
    lengths = Lengths.read(given.lengths) if given.lengths else Lengths.lognormal(mean=1014, sigma=1.26)
    whole, lengths = lengths, lengths.clipped(given.context)
    plan = plan_of_context(given.context)
    results: dict[str, Any] = {
        "lengths": str(lengths), "text: largest / mean work": measure_text(plan, lengths),
        "clips: largest / mean work": measure_clips(), "CPU ms of an assignment": measure_cost(plan, lengths),
    }  # fmt: skip
    for name in given.models:
        plans = plans_of_degrees(name)
        for context in (196608, 393216):
            results[f"groups in one step: {name}, up to {context:,} tokens"] = measure_groups(
                name, context, plans, whole
            )
    if given.json:
        print(json.dumps(results, indent=1))
        return
    for name, found in results.items():
        print(name, found if isinstance(found, str) else "")
        for what, number in found.items() if isinstance(found, dict) else ():
            print(f"  {what:32} {number:8.3f}")


if __name__ == "__main__":
    main()
