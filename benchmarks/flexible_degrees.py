"""FlexSP's setting (arXiv 2412.01523), which `lengths.py --models` prints: unlike groups of devices in one step.

LLaMA of GPT's sizes on 64 A100s with 40 GB in 8 nodes with two 200 Gb/s InfiniBand adapters each, batches of 512
sequences of Wikipedia, those of more than 192k or 384k tokens left out.  Step time of groups of several degrees in one
step, predicted, against one degree for all batches (which must hold the longest sequence: the best such degree, and 64,
which FlexSP's baseline has on these lengths) and against the best degree for each batch.

Twice: by our prices, of the plans that the search finds for each degree (rows of `DEVICE_TOKENS` tokens a device,
ZeRO-3), and by FlexSP's own prices (the solver of its repository, branch flexsp: fits of compute, all-to-alls
measured on its cluster), which say what our assignments gain there.  A group computes its sequences one after the
other, in microbatches of `DEVICE_TOKENS` tokens a device; all groups run equally many, because ZeRO-3 gathers
parameters over all devices in each.  FlexSP forms new groups for each microbatch; here the groups stay for the step.

`measure_batches` (`lengths.py --batches`) shows each batch, and two other ways to form groups.  Groups that overlap
(`autopar.balance.nested_groups`): a device has one microbatch after the other in groups of falling degree.  New groups
in each microbatch: the sequences sorted by length are cut into microbatches of like tokens, and groups chosen for each
of them; nothing of autopar runs or plans such steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.balance import Lengths
from autopar.balance.costs import GroupCost
from autopar.balance.groups import Groups, best_groups
from autopar.balance.nested_groups import NestedKind, nest
from autopar.errors import AutoparError

DEVICES = 64
DRAWS = 20  # batches, whose mean is shown
CONTEXTS = (196608, 393216)
DEVICE_TOKENS = 6144  # of a microbatch: 192k tokens are then a row of 32 devices, 384k of 64, as FlexSP's memory allows
# Hidden size, that of the feed-forward, layers; all with the 64 heads that FlexSP's configurations have.
SIZES = {"6.7B": (4096, 11008, 32), "13B": (5120, 13824, 40), "30B": (6656, 17920, 60)}
HEADS = 64
# Speedup over DeepSpeed's static degree, and that of the best degree for each batch: README.md beside lengths.csv.
PUBLISHED = {
    ("6.7B", 196608): (1.72, 1.34), ("6.7B", 393216): (1.46, 1.32), ("13B", 196608): (1.59, 1.31),
    ("13B", 393216): (1.43, 1.21), ("30B", 196608): (1.64, 1.23), ("30B", 393216): (1.53, 1.18),
}  # fmt: skip
# FlexSP's: milliseconds per squared token, per token, and per microbatch, of one device.
FITS = {
    "6.7B": (5.128e-6, 0.1839576, 629.3563), "13B": (9.2852e-6, 0.3060189, 1132.5632),
    "30B": (15.4262e-6, 0.8035742, 2789.3644),
}  # fmt: skip
MORE_MICROBATCHES = 2  # than tokens need, tried with new groups in each, or overlapping ones: more were never faster
ENOUGH = 0.002  # of a step, to which targets of overlapping groups are searched for
RESAMPLED = 1000  # bootstrap over batches
EXCHANGE_GIB_PER_S = {1: np.inf, 2: 119.54, 4: 104.07, 8: 96.5, 16: 10.33, 32: 5.94, 64: 4.87}  # all-to-all of a degree


@dataclass(frozen=True)
class Degrees:
    """The cost of sequences on each number of devices that share them."""

    costs: Sequence[GroupCost]

    def flexible(self, tokens: np.ndarray) -> Groups:
        """Of several degrees, for a step."""
        return best_groups(self.costs, DEVICES, tokens)

    def renewed_s(self, tokens: np.ndarray) -> float:
        """Of a step with new groups of several degrees in each microbatch."""
        costs = [replace(cost, step_s=0.0) for cost in self.costs]
        ordered = np.sort(tokens)[::-1]
        before = np.cumsum(ordered) - ordered
        least = -(-int(tokens.sum()) // (DEVICES * DEVICE_TOKENS))
        steps_s: list[float] = []
        for count in range(least, least + MORE_MICROBATCHES + 1):
            number = before * count // tokens.sum()
            parts = (ordered[number == each] for each in range(count))
            steps_s.append(sum(best_groups(costs, DEVICES, part).step_s for part in parts if len(part)))
        return min(steps_s) + max(cost.step_s for cost in self.costs)

    def nested_s(self, tokens: np.ndarray) -> float:
        """Of a step in which groups may overlap, or `flexible` if that is faster."""
        found = self.flexible(tokens)
        costs = sorted(self.costs, key=lambda cost: -cost.degree)
        kinds = [NestedKind(cost.degree, cost.tokens, 0.0, cost.token_s, cost.pair_s) for cost in costs]
        step_s, microbatch_s = (max(getattr(cost, what) for cost in costs) for what in ("step_s", "microbatch_s"))
        least = -(-int(tokens.sum()) // (DEVICES * DEVICE_TOKENS))
        best_s = found.step_s
        for rows in range(least, least + MORE_MICROBATCHES + 1):
            fixed_s, target_s = step_s + rows * microbatch_s, found.bound_s
            while (best_s - fixed_s) / target_s > 1 + ENOUGH:
                middle_s = (target_s + best_s - fixed_s) / 2
                places = nest(kinds, DEVICES, tokens, middle_s, rows)
                if places is None:
                    target_s = middle_s
                else:
                    best_s = fixed_s + places.largest_s
        return best_s

    def alone_s(self, cost: GroupCost, tokens: np.ndarray) -> float:
        """Of a step whose groups all have the degree of `cost`."""
        if tokens.max() > cost.tokens:
            return np.inf
        return best_groups([cost], DEVICES, tokens).step_s

    def by_room_s(self, cost: GroupCost, tokens: np.ndarray) -> float:
        """As `alone_s`, with sequences packed as FlexSP's baselines do: best fit into as few groups as have room, so
        many of which are a microbatch, and wait for each other.
        """
        if tokens.max() > cost.tokens:
            return np.inf
        room = max(0.9 * cost.tokens, float(tokens.max()))
        left, load = np.full(len(tokens), room), np.zeros(len(tokens))
        for length in np.sort(tokens)[::-1]:
            place = int(np.where(left >= length, left, np.inf).argmin())
            left[place] -= length
            load[place] += cost.seconds(np.array([length]))[0]
        groups = DEVICES // cost.degree
        used = load[load > 0]
        used = np.append(used, np.zeros(-len(used) % groups)).reshape(-1, groups)
        return float(used.max(axis=1).sum()) + cost.step_s + len(used) * cost.microbatch_s


def found_degrees(name: str) -> Degrees:
    """By the plans that the search finds."""
    rows = [(degree, plan.prediction.row) for degree, plan in _plans(name)]
    return Degrees([
        GroupCost(degree, row.token_s, row.own_pair_s, row.tokens, row.step_s, row.microbatch_s) for degree, row in rows
    ])  # fmt: skip


def _plans(name: str) -> Iterator[tuple[int, autopar.Plan]]:
    hidden, ffn, layers = SIZES[name]
    cluster = autopar.Cluster.of("a100-40gb", devices_per_node=8, nodes=8, between="infiniband-50")
    for degree in EXCHANGE_GIB_PER_S:
        tokens, rows = DEVICE_TOKENS * degree, DEVICES // degree
        config = LlamaConfig(hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, use_cache=False,
                             num_attention_heads=HEADS, vocab_size=50304, max_position_embeddings=tokens)  # fmt: skip
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
        constraints = ("zero=3", f"data={rows}") if rows > 1 else ("zero=3",)
        try:
            plan = autopar.plan(model, cluster, {"input_ids": ids, "labels": ids}, precision="bf16", compile=False,
                                constraints=constraints)  # fmt: skip
        except AutoparError as error:
            print(f"{name}, {degree} devices a sequence: {error}", file=sys.stderr)
            continue
        print(f"{name}, {degree} devices a sequence: {plan.headline}", file=sys.stderr, flush=True)
        if plan.prediction.row.ranks == rows:  # else attention is split otherwise than asked for
            yield degree, plan


def published_degrees(name: str) -> Degrees:
    """By FlexSP's prices: Ulysses exchanges four tensors of a layer in bfloat16, forward and backward."""
    hidden, _, layers = SIZES[name]
    pair_ms, token_ms, microbatch_ms = FITS[name]
    exchanged = 4 * 2 * 2 * layers * hidden
    costs = [
        GroupCost(
            degree, (token_ms / 1e3 + exchanged / (rate * 2**30)) / degree, pair_ms / 1e3 / degree,
            DEVICE_TOKENS * degree, microbatch_s=microbatch_ms / 1e3,
        )
        for degree, rate in EXCHANGE_GIB_PER_S.items()
    ]  # fmt: skip
    return Degrees(costs)


def draw(lengths: Lengths, context: int) -> list[np.ndarray]:
    """The batches of a setting."""
    random = np.random.default_rng(0)
    return [lengths.up_to(context).draw(512, random) for _ in range(DRAWS)]


def speedups(degrees: Degrees, lengths: Lengths, context: int) -> dict[str, float]:
    """Of groups of several degrees; means over batches of up to `context` tokens a sequence."""
    batches = draw(lengths, context)
    flexible = [degrees.flexible(tokens) for tokens in batches]
    flexible_s = float(np.mean([found.step_s for found in flexible]))
    even, by_room = (
        np.array([[seconds(cost, tokens) for cost in degrees.costs] for tokens in batches])
        for seconds in (degrees.alone_s, degrees.by_room_s)
    )
    static = {cost.degree: even[:, place].mean() for place, cost in enumerate(degrees.costs) if cost.tokens >= context}
    best = min(static, key=lambda degree: static[degree])
    gaps = [float(found.packed.load.max()) / found.bound_s - 1 for found in flexible]
    return {
        "s of a step": flexible_s,
        "work above the least possible": float(np.mean(gaps)),
        f"/ best static degree ({best})": static[best] / flexible_s,
        f"/ FlexSP's static degree ({DEVICES})": static[DEVICES] / flexible_s,
        "/ one degree a batch": even.min(axis=1).mean() / flexible_s,
        "/ one degree a batch, filled for room": by_room.min(axis=1).mean() / flexible_s,
    }


def batch_by_batch(degrees: Degrees, lengths: Lengths, context: int) -> dict[str, Any]:
    """Seconds of each batch, and what they say of FlexSP's static degree."""
    batches = draw(lengths, context)
    flexible = [degrees.flexible(tokens) for tokens in batches]
    step_s = np.array([found.step_s for found in flexible])
    nested_s = np.array([degrees.nested_s(tokens) for tokens in batches])
    renewed_s = np.array([degrees.renewed_s(tokens) for tokens in batches])
    whole = next(cost for cost in degrees.costs if cost.degree == DEVICES)
    static_s = np.array([degrees.alone_s(whole, tokens) for tokens in batches])
    least = [-(-int(tokens.sum()) // (DEVICES * DEVICE_TOKENS)) for tokens in batches]
    fixed_s = np.array(least) * min(cost.microbatch_s for cost in degrees.costs) + min(c.step_s for c in degrees.costs)
    bound_s = np.array([found.bound_s for found in flexible]) + fixed_s
    random = np.random.default_rng(0)
    picked = random.integers(0, len(batches), (RESAMPLED, len(batches)))
    drawn = static_s[picked].sum(axis=1) / step_s[picked].sum(axis=1)
    better_s = np.minimum(step_s, renewed_s)
    rows = {
        f"{number + 1:2}: longest {tokens.max():>7,}, {found.microbatches} microbatches ({need} needed)": (
            f"{own_s:6.2f} s, overlapping {nested:6.2f}, new groups each {new_s:6.2f}, no less than {low_s:6.2f}"
        )
        for number, (tokens, found, need, own_s, nested, new_s, low_s) in enumerate(
            zip(batches, flexible, least, step_s, nested_s, renewed_s, bound_s, strict=True)
        )
    }
    return rows | {
        f"/ FlexSP's static degree ({DEVICES})": float(static_s.sum() / step_s.sum()),
        "its standard error (bootstrap)": float(drawn.std()),
        "groups that overlap": float(static_s.sum() / nested_s.sum()),
        "new groups in each microbatch": float(static_s.sum() / renewed_s.sum()),
        "the better of both for each batch": float(static_s.sum() / better_s.sum()),
        "no groups more than": float(static_s.sum() / bound_s.sum()),
    }


def measure_batches(name: str, lengths: Lengths, prices: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Batch by batch, for each context."""
    for own, degrees in degrees_by(name, prices).items():
        for context in CONTEXTS:
            title = f"batch by batch: {name}, up to {context:,} tokens, by {own} prices"
            yield title, batch_by_batch(degrees, lengths, context)


def degrees_by(name: str, prices: str) -> dict[str, Degrees]:
    """`prices`: ``"ours"``, which are searched for in minutes, ``"flexsp"``, or ``"both"``."""
    made = {} if prices == "flexsp" else {"our": found_degrees(name)}
    return made | ({} if prices == "ours" else {"FlexSP's": published_degrees(name)})


def measure(name: str, lengths: Lengths, prices: str) -> Iterator[tuple[str, dict[str, float]]]:
    """What is shown of a model, for each context."""
    found = degrees_by(name, prices)
    for context in CONTEXTS:
        title = f"unlike groups in one step: {name}, up to {context:,} tokens"
        over_static, each_over_static = PUBLISHED[name, context]
        for own, degrees in found.items():
            yield f"{title}, by {own} prices", speedups(degrees, lengths, context)
        yield f"{title}, published", {
            "/ static degree": over_static, "/ one degree a batch": over_static / each_over_static
        }  # fmt: skip
