"""How even the work of devices is when sequences have many lengths, and what sharing them out costs.

    python benchmarks/lengths.py [--lengths FILE] [--context 131072] [--models 6.7B 13B 30B] [--json]
    python benchmarks/lengths.py --lengths FILE --models 6.7B 13B 30B --batches [--prices flexsp]

(a) LLaMA 7B on 64 H100s: largest / mean work of data-parallel ranks, attention and linear work of tokens, by the prices
    of the plan that the search finds (estimates), with documents packed into rows as they come, and assigned over
    1 to 8 batches.
(b) FlexSP's setting (`flexible_degrees.py`): groups of several degrees in one step, predicted, against one degree,
    beside what FlexSP measured.  It takes minutes for each model.  With --batches, only each of its batches.
(c) Images on 16 GPUs and video clips on 32, the mixes of KnapFormer (commit efda11b): each GPU its own clips as they
    come, and clips assigned to groups of 1 to 8 GPUs. Work is in floating-point operations of a transformer of 57
    blocks, width 3072; communication within groups counts nothing.
(d) CPU milliseconds of one assignment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import autopar
from autopar.balance import Assignment, BatchPlanner, Clip, Lengths
from autopar.balance.group_rows import assign_groups
from autopar.plan import Decisions, Plan
from autopar.plan.prediction import GroupRow, Prediction, RowCost
from benchmarks.flexible_degrees import SIZES, measure, measure_batches

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


def plan_of_context(context: int) -> Plan:
    """LLaMA 7B, `ROWS` sequences of `context` tokens, 64 H100s."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                         vocab_size=32000, max_position_embeddings=context, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.zeros(ROWS, context, dtype=torch.int64, device="meta")
    cluster = autopar.Cluster.of("h100", devices_per_node=8, nodes=8)
    return autopar.plan(model, cluster, {"input_ids": ids, "labels": ids, "position_ids": ids})


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


def measure_clips(mix: Sequence[tuple[int, int, Clip]]) -> dict[str, float]:
    """(c): the mean, before, and the mean and largest after, of largest / mean work of a GPU."""
    devices = sum(number for number, _, _ in mix)
    planner = BatchPlanner([plan_of_degree(degree, devices) for degree in (1, 2, 4, 8)])
    alone = next(cost for cost in planner.costs if cost.degree == 1)
    before, after = [], []
    for seed in range(DRAWS):
        random = np.random.default_rng(seed)
        gpus = [
            [clip.tokens + int(random.integers(0, MOST_TEXT + 1)) for _ in range(count)]
            for number, count, clip in mix
            for _ in range(number)
        ]
        own = np.array([alone.seconds(np.array(each)).sum() for each in gpus])
        before.append(float(own.max() / own.mean()))
        found = planner.assign([n for each in gpus for n in each])
        after.append(found.largest_s * devices / float(own.sum()))  # devices that no group has count as waiting
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
    return found | measure_group_cost()


def group_rows(most: int = 64, room: int = 16384, longest: int = 131072) -> tuple[GroupRow, ...]:
    """Groups of 64 devices to one, each with `room` tokens a device: made-up prices, near those of a 7B model."""
    degrees = [most >> power for power in range(most.bit_length())]
    more = [1 + 0.04 * math.log2(degree) for degree in degrees]  # what devices spend on each other
    return tuple(
        GroupRow(
            degree, min(longest, room * degree), 1e-4 * min(longest, room * degree) / degree * x, 4e-9 / degree * x
        )
        for degree, x in zip(degrees, more, strict=True)
    )


def measure_group_cost() -> dict[str, float]:
    """(d) with groups of unlike size, for lengths with a heavy tail, and short ones: means of draws, and gaps."""
    kinds = group_rows()
    drawn = {"": Lengths.lognormal(mean=20_000, sigma=1.5), "short ": Lengths.lognormal(mean=1000, sigma=1.0)}
    sizes = ("", 512, 64), ("short ", 512, 64), ("", 10_000, 4096)
    found: dict[str, float] = {}
    for (kind, count, devices), nests in itertools.product(sizes, (False, True)):
        times, gaps = [], []
        for seed in range(6):
            tokens = np.asarray(drawn[kind].clipped(131072).draw(count, seed))
            started_s = time.process_time()
            assignment = assign_groups(kinds, 0.5, devices, tokens, nests=nests)
            times.append(time.process_time() - started_s)
            gaps += [assignment.gap] if assignment else []
        name = f"{count} {kind}sequences, {'overlapping ' * nests}groups of {devices} devices"
        found |= {name: 1e3 * float(np.median(times)), f"{name}: gap": float(np.mean(gaps))}
    return found


def measure_balance(lengths: Lengths, context: int) -> dict[str, Any]:
    """(a), (c) and (d)."""
    plan = plan_of_context(context)
    return {
        "lengths": str(lengths), "text: largest / mean work": measure_text(plan, lengths),
        "images: largest / mean work": measure_clips(MIX[:4]), "clips: largest / mean work": measure_clips(MIX),
        "CPU ms of an assignment": measure_cost(plan, lengths),
    }  # fmt: skip


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", help="a file of lengths, or of the columns quantile and tokens")
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--models", nargs="*", default=[], choices=list(SIZES), help="of (b), which takes minutes each")
    parser.add_argument("--batches", action="store_true", help="of --models only, each batch")
    parser.add_argument(
        "--prices", default="both", choices=["ours", "flexsp", "both"], help="of (b): ours take a search"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    # Without a file: what fits Wikipedia's body.
    lengths = Lengths.read(given.lengths) if given.lengths else Lengths.lognormal(mean=1014, sigma=1.26)
    results: dict[str, Any] = {} if given.batches else measure_balance(lengths.clipped(given.context), given.context)
    for name in given.models:
        results |= (measure_batches if given.batches else measure)(name, lengths, given.prices)
    if given.json:
        print(json.dumps(results, indent=1))
        return
    for name, found in results.items():
        print(name, found if isinstance(found, str) else "")
        for what, number in found.items() if isinstance(found, dict) else ():
            print(f"  {what:40} {number if isinstance(number, str) else format(number, '8.3f')}")


if __name__ == "__main__":
    main()
