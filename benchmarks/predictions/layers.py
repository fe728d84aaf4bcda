"""Every layer kind of the model zoo on this machine's CPU: ``python benchmarks/accuracy.py layers [--json]``.

One process, one thread.  The layers of a model, one of each kind, are lowered for one device and run forward and
backward; a layer's seconds are compared with two predictions:

- ``ops``: the sum of the prices of its ops, from a profile of ops that this command measures first;
- ``layers``: the same layer timed as a whole before, independently of the measurement (what `parallelize` does with the
  layers of its best plans).  It says how well a measurement can be repeated at all.

Seconds are the thread's own.  Profile and layers are measured in turn, several times, and of each number the smallest
median counts: whatever else runs on a shared machine only ever makes things slower.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
import transformers
from torch import nn

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.cost.measure.layer_times import time_layer
from autopar.cost.measure.ops import op_probes
from autopar.cost.profile import Curve, Point
from autopar.lower.program.single_layer import SingleLayer
from autopar.planning.call_traces import trace_model
from autopar.program import Layer, Program
from autopar.step.layer.local_layer import whole_strategy
from tests import models

_CPU = torch.device("cpu")
_EACH_S = 0.1  # of one layer in one round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may follow ``accuracy.py layers``."""
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    parser.add_argument(
        "--quick", action="store_true", help="with the profile that parallelize measures, not the dense one"
    )
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for the profile in each round, about")
    parser.add_argument("--models", default="", help="of those whose name contains one of these words only, a,b")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


Made = tuple[nn.Module, dict[str, Any]]


def _wide(name: str, batch: int, length: int) -> Made:
    """Models of a width at which products take most of the time."""
    sizes = {"vocab_size": 1024, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = models.tokens(batch, length, 1024)
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=704, num_key_value_heads=2, pad_token_id=0)
        return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=1024, n_embd=256, n_layer=2, n_head=4, n_positions=512,
                                         resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}
    config = transformers.BertConfig(**sizes, intermediate_size=1024, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0)  # fmt: skip
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def _models() -> Iterator[tuple[str, Made]]:
    for name in models.ZOO:
        yield name, models.make(name, torch.float32)
    for name in ("llama", "gpt2", "bert", "t5", "bart", "plain_gpt", "unet", "vit", "skip_unet"):
        yield f"{name}, batch 32", getattr(models, f"make_{name}")(batch=32)
    for name in ("llama", "gpt2", "bert"):
        yield f"{name}, length 64", getattr(models, f"make_{name}")(batch=8, length=64)
        yield f"{name}, width 256, 4 x 64", _wide(name, 4, 64)
        yield f"{name}, width 256, 2 x 256", _wide(name, 2, 256)


@dataclass
class Case:
    """A layer kind of a model, and its seconds (forward, backward): predicted by ops, timed before, measured."""

    model: str
    layer: Layer
    program: Program
    lone: SingleLayer
    before: list[tuple[float, float]] = field(default_factory=list)
    measured: list[tuple[float, float]] = field(default_factory=list)

    def by_ops(self, prices: ClusterPrices) -> tuple[float, float]:
        """The sums of its ops' prices, by those of its program."""
        ahead = back = 0.0
        for op in self.layer.ops:
            types = (tuple(map(self.program.type_of, names)) for names in (op.operands, op.results))
            has_gradient = any(self.program.values[name].requires_grad for name in op.results)
            time = prices.op_s(op, *types, has_gradient)
            ahead, back = ahead + time.forward_s, back + time.backward_s
        return ahead, back


def _cases(words: str) -> Iterator[list[Case]]:
    for name, (model, inputs) in _models():
        if words and not any(word in name for word in words.split(",")):
            continue
        traced = trace_model(model, inputs)
        yield [
            Case(
                name,
                layer,
                traced.program,
                SingleLayer(traced.program, layer, whole_strategy(layer), constants=traced.constants),
            )
            for layer in traced.program.kinds
        ]


def _time(cases: list[Case]) -> list[tuple[float, float]]:
    lones = [(case.lone, case.lone.backward if case.lone.is_differentiable else None) for case in cases]
    found = [time_layer(lone.forward, backward, _CPU, _EACH_S) for lone, backward in lones]
    return [(time.forward_s, time.backward_s) for time in found]


def _measure_ops(budget_s: float, *, is_dense: bool) -> dict[tuple[str, int], Point]:
    """The points of every curve, in seconds of this thread's own."""
    probes = op_probes(_CPU, ("float32",), is_dense=is_dense)
    shares = sum(probe.share for probe in probes)
    counts: defaultdict[str, int] = defaultdict(int)
    found: dict[tuple[str, int], Point] = {}
    for probe in probes:
        for each in probe.measure(budget_s * probe.share / shares):
            found[each.key, counts[each.key]] = Point(each.amount, each.sample.seconds, each.sample.spread)
            counts[each.key] += 1
    return found


def _least(old: Point | None, new: Point) -> Point:
    return new if old is None or new.seconds < old.seconds else old


def _profile(points: dict[tuple[str, int], Point]) -> Profile:
    curves: defaultdict[str, list[Point]] = defaultdict(list)
    for (key, _), point in points.items():
        curves[key].append(point)
    made = {key: Curve(tuple(found)) for key, found in curves.items()}
    return Profile("cpu", 1, datetime.now(UTC).isoformat(timespec="seconds"), {}, made)


def run(options: argparse.Namespace) -> int:
    """Measure, predict, print; returns the exit status."""
    torch.set_num_threads(1)
    groups = list(_cases(options.models))
    points: dict[tuple[str, int], Point] = {}
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        for key, point in _measure_ops(options.budget, is_dense=not options.quick).items():
            points[key] = _least(points.get(key), point)
        for times in ("before", "measured"):
            for cases in groups:
                for case, found in zip(cases, _time(cases), strict=True):
                    getattr(case, times).append(found)
    profile = _profile(points)
    prices = ClusterPrices(Cluster.of("cpu"), profile)
    outcomes = [outcome for cases in groups for outcome in _outcomes(cases, prices)]
    _print(outcomes, profile)
    if options.json:
        found = {name: statistics.median(abs(o[name] - 1) for o in outcomes) for name in ("ops", "layers")}
        print(json.dumps({"median_absolute_error": found, "layers": len(outcomes), "rounds": options.rounds}))
    return 0


def _outcomes(cases: list[Case], prices: ClusterPrices) -> Iterator[dict[str, Any]]:
    for case in cases:
        before, measured = (tuple(map(min, zip(*times, strict=True))) for times in (case.before, case.measured))
        predicted = case.by_ops(prices)
        yield {
            "model": case.model, "layer": case.layer.name, "count": len(case.layer.ops), "measured_s": sum(measured),
            "ops": sum(predicted) / sum(measured), "layers": sum(before) / sum(measured),
            "forward": predicted[0] / measured[0], "backward": predicted[1] / measured[1] if measured[1] else 1.0,
        }  # fmt: skip


def _print(outcomes: list[dict[str, Any]], profile: Profile) -> None:
    print(f"{'model':<28} {'layer':<22} {'ops':>4} {'measured':>10}  predicted / measured")
    print(f"{'':<28} {'':<22} {'':>4} {'us':>10} {'ops':>7} {'forward':>8} {'backward':>8} {'layers':>7}")
    for o in outcomes:
        print(
            f"{o['model']:<28} {o['layer'][:22]:<22} {o['count']:>4} {o['measured_s'] * 1e6:>10.0f} {o['ops']:>7.2f} "
            f"{o['forward']:>8.2f} {o['backward']:>8.2f} {o['layers']:>7.2f}"
        )
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"python {platform.python_version()}, {profile.date}, load {os.getloadavg()[0]:.1f} (a shared machine), "
          f"median spread of the profile's points {profile.spread:.0%}")  # fmt: skip
    for name in ("ops", "layers"):
        errors = [abs(outcome[name] - 1) for outcome in outcomes]
        print(f"{name:>7}: median absolute error {statistics.median(errors):.1%}, mean {statistics.mean(errors):.1%}, "
              f"90 % within {sorted(errors)[int(0.9 * len(errors))]:.0%}, over {len(errors)} layer kinds")  # fmt: skip
