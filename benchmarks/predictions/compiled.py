"""What compiling gains: published pairs of an eager and a compiled run of one model, and what plans predict.

The models are traced, planned as the runs were parallelized, and priced as every plan is.  No constant of the fusion
model is fitted to these rows or to others: all of them are held out.  Rows that recompute some products are planned
with full recomputation, the nearest that there is for both.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "run"]

_PUBLISHED = Path(__file__).parents[1] / "published"
# Ids of the eager and the compiled row.
_PAIRS = (
    ("TTX-001", "TTX-002"),
    ("TT-004", "TT-005"),
    ("FMSX-4ffb-7b-A100", "FMSX-ed74-7b-A100"),
    ("FMSX-4ffb-7b-H100", "FMSX-ed74-7b-H100"),
    ("FMSX-4ffb-13b-A100", "FMSX-ed74-13b-A100"),
    ("FMSX-4ffb-13b-H100", "FMSX-ed74-13b-H100"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How to print."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Print published and predicted gains."""
    rows = [_predicted(*pair) for pair in _PAIRS]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print("| pair | published | predicted | tokens/s per device, eager | compiled |")
    print("|---|---|---|---|---|")
    for row in rows:
        rates = [f"{row['published'][way]:.0f}; {row['rates'][way]:.0f}" for way in (0, 1)]
        print(f"| {row['pair']} | {row['gain']:.2f}x | {row['predicted']:.2f}x | {rates[0]} | {rates[1]} |")
    errors = [abs(row["predicted"] / row["gain"] - 1) for row in rows]
    print(f"mean error of the gain: {sum(errors) / len(errors):.1%}")
    return 0


@cache
def _runs() -> dict[str, Any]:
    from benchmarks.published.runs import Run, read_runs  # noqa: PLC0415

    paths = (_PUBLISHED / "throughput.csv", _PUBLISHED / "unseen" / "first.csv")
    return {each.id: each for path in paths for each in read_runs(path) if isinstance(each, Run)}


def _predicted(eager: str, compiled: str) -> dict[str, Any]:
    rows = [_runs()[name] for name in (eager, compiled)]
    published = [each.tokens_per_s for each in rows]
    rates = [_tokens_per_s(rows[0], compiled=way) for way in (False, True)]
    return {
        "pair": f"{eager}, {compiled}", "published": published, "gain": published[1] / published[0],
        "rates": rates, "predicted": rates[1] / rates[0],
    }  # fmt: skip


def _tokens_per_s(row: Any, *, compiled: bool) -> float:
    """Per device, of the plan that is most like the row."""
    from autopar.cost import ClusterPrices  # noqa: PLC0415
    from autopar.search import SearchRequest, search  # noqa: PLC0415
    from benchmarks.published.calibration import CALIBRATED  # noqa: PLC0415
    from benchmarks.published.clusters import prices_of  # noqa: PLC0415

    program, training = _program(row)
    recompute = "none" if row.recompute in ("", "none") else "full"
    prices = prices_of(row, CALIBRATED)
    # These rows are older than torch 2.11, which was the first to prefer cuDNN's attention.
    flash = replace(prices.cluster.device, new_attention_efficiency=0.0)
    prices = ClusterPrices(replace(prices.cluster, device=flash))
    constraints = (f"data={row.num_devices}", "zero=3", f"recompute={recompute}", "microbatches=1")
    training = training.on_device(prices.device).running(compiled=compiled)
    plan = search(program, row.num_devices, prices, SearchRequest(1e15, training, constraints))
    return row.micro_batch * row.length / plan.step_time_s


@cache
def _program(row: Any) -> tuple[Any, Any]:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    from autopar.planning.arguments import training_spec  # noqa: PLC0415
    from autopar.planning.call_traces import trace_model  # noqa: PLC0415

    config = transformers.LlamaConfig(
        vocab_size=row.vocabulary, hidden_size=row.hidden, intermediate_size=row.ffn, num_hidden_layers=row.num_layers,
        num_attention_heads=row.num_heads, num_key_value_heads=row.num_kv_heads, max_position_embeddings=row.length,
        use_cache=False, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        ids = torch.zeros(row.num_devices * row.micro_batch, row.length, dtype=torch.long)
    traced = trace_model(model, {"input_ids": ids, "labels": ids}, dtype=torch.bfloat16)
    return traced.program, training_spec(model, "adamw")
