"""Which models of transformers train as on one device: every class that makes a loss, small and with random weights.

    python benchmarks/architectures.py [--task causal ...] [--only llama ...] [--seconds 200] [--json FILE]

Each class is built from its own configuration with 2 layers, 32 hidden units and little of the rest; what
can't be built so, or doesn't run on one device with the inputs made up here, is counted apart.  What runs is traced
and trained for two steps in float64 on four simulated ranks: by the plan of a free search (or, where stages are exact,
of one for two stages), and by a random plan.  Its loss must be within 1e-10 of one device's, gradients within 1e-8,
parameters after the steps within 1e-6, relative: batch norm over four values after a ReLU magnifies rounding so much.
Models that draw random numbers in training are not compared, as ranks draw others than one device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from autopar.errors import AutoparError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.search.microbatches import TimeAssignment, time_assignment
from autopar.verify import compare
from autopar.verify.rehearsal import keep_double_program, run_parallel, run_single
from tests.random_plans import random_plan
from tests.zoo import quick_prices

WORLD, STEPS, BATCH, LENGTH, VOCABULARY = 4, 2, 8, 16, 64
LARGEST = 60e6  # parameters: what is larger is no small model, and takes minutes
TASKS = {
    "causal": "CAUSAL_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM", "masked": "MASKED_LM", "text": "SEQUENCE_CLASSIFICATION",
    "image": "IMAGE_CLASSIFICATION", "segmentation": "SEMANTIC_SEGMENTATION", "ctc": "CTC",
    "audio": "AUDIO_CLASSIFICATION",
}  # fmt: skip
WIDTHS = (
    (r"(num_key_value_heads|n_kv_heads?|num_kv_heads|multi_query_group_num)$", 2),
    (r"(attention_heads|num_heads|n_heads?|_heads)$", 4),
    (r"^(hidden_size|n_embd|d_model|dim|embed_dim|embedding_size|hidden_dim|word_embed_proj_dim|emb_dim|d_embed)$", 32),
    (r"(intermediate_size|d_ff|ffn_dim|n_inner|d_inner|ffn_hidden_size|intermediate_size_mlp)$", 64),
    (r"(head_dim|d_kv|kv_channels)$", 8),
    (r"^(kv_lora_rank|q_lora_rank)$", 16),
    (r"^rotary_dim$", 4),
)
OTHERS = (
    (r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|n_(en|de)coder_layers)$", 2),
    (r"vocab_size$", VOCABULARY),
    (r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts)$", 4),
    (r"^(num_experts_per_tok|moe_k|num_experts_per_token|moe_topk|top_k_experts)$", 2),
    (r"^(n_group|topk_group|first_k_dense_replace)$", 1),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)$", 64),
    (r"(dropout|pdrop|drop_prob|drop_rate|drop_path_rate|layerdrop|dropout_rate|dropout_prob|dropout_p)$", 0.0),
    (r"^mask_(time|feature)_prob$", 0.0),  # which frames are masked is drawn by NumPy
    (r"(pad|bos|eos|sep|cls|mask|decoder_start)_token_id$", 1),
    (r"^(sliding_window|attention_window_size|attention_chunk_size)$", 8),
)
IMAGE = ((r"^image_size$", 32), (r"^patch_size$", 8))
BUILDS = (WIDTHS + OTHERS + IMAGE, (*WIDTHS[:4], *OTHERS, *IMAGE), OTHERS + IMAGE, (*OTHERS, (r"^image_size$", 96)))
"""What is made small: everything; all but the size of heads; no widths; convolutions need larger images."""


def small_values(config: Any, rules: tuple[tuple[str, float], ...], depth: int = 0) -> dict[str, Any]:
    """The numbers of a configuration, and of those inside it, that some rule makes smaller."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig) and depth < 2:
            values[name] = small_values(value, rules, depth + 1)
        elif name == "conv_dim":  # the widths of the convolutions over a wave
            values[name] = [32] * len(value)
        elif name == "vocab_size" or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            small = next((small for pattern, small in rules if re.search(pattern, name)), None)
            values |= {name: small} if small is not None else {}
    kinds = getattr(config, "layer_types", None)
    if kinds and "num_hidden_layers" in values:  # one layer of each kind
        distinct = list(dict.fromkeys(kinds))
        count = values["num_hidden_layers"] = max(2, len(distinct))
        values["layer_types"] = (distinct * count)[:count]
    return values


def make_model(task: str, kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The first build that runs on one device; the error of the last one if none does."""
    name = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")[kind]
    config_class = transformers.CONFIG_MAPPING[kind]
    for number, rules in enumerate(BUILDS):
        try:
            config = config_class(**small_values(config_class(), rules))
            if task == "causal" and not hasattr(config, "vocab_size"):
                config = config.get_text_config()
            config.use_cache = False
            torch.manual_seed(0)
            model = getattr(transformers, name if isinstance(name, str) else name[0])(config).train()
            if sum(each.numel() for each in model.parameters()) > LARGEST:
                raise ValueError("too large")
            inputs = make_inputs(task, model)
            model(**inputs).loss.backward()
        except Exception:
            if number == len(BUILDS) - 1:
                raise
        else:
            model.zero_grad(set_to_none=True)
            doubles = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
            return model.double(), doubles
    raise AssertionError


def make_inputs(task: str, model: Any) -> dict[str, Tensor]:
    """A batch for this task, in float32."""
    generator = torch.Generator().manual_seed(1)
    config = model.config

    def ids(*shape: int, most: int = VOCABULARY) -> Tensor:
        return torch.randint(3 if most > 3 else 0, most, shape, generator=generator)

    if task in ("image", "segmentation"):
        sizes = getattr(config, "image_size", None) or 64
        size = sizes if isinstance(sizes, int) else sizes[0]
        images = torch.randn(BATCH, getattr(config, "num_channels", 3), size, size, generator=generator)
        shape = (BATCH, size, size) if task == "segmentation" else (BATCH,)
        return {"pixel_values": images, "labels": ids(*shape, most=2)}
    if task in ("ctc", "audio"):
        is_wave = model.main_input_name == "input_values"
        shape = (BATCH, 4000) if is_wave else (BATCH, 64, num_audio_features(config))
        labels = ids(BATCH, 4, most=30) if task == "ctc" else ids(BATCH, most=2)
        return {model.main_input_name: torch.randn(shape, generator=generator), "labels": labels}
    tokens = ids(BATCH, LENGTH)
    labels = {"text": ids(BATCH, most=2), "seq2seq": ids(BATCH, LENGTH // 2)}
    return {"input_ids": tokens, "labels": labels.get(task, tokens)}


def num_audio_features(config: Any) -> int:
    """How many numbers a model of audio gets for each frame."""
    for each in (config, getattr(config, "encoder_config", None)):
        for name in ("num_mel_bins", "feature_projection_input_dim"):
            if number := getattr(each, name, None):
                return number
    return 80


def plans_of(program: Program) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """The plans that a program is trained by, with names."""
    with_stages = isinstance(time_assignment(program, 2, joins_outputs=True), TimeAssignment)
    texts = ("pipeline=2",) if with_stages and len(program.layers) > 1 else ()
    request = SearchRequest(constraints=texts, schedules=schedule_actions)
    yield " ".join(texts) or "free", lambda: search(program, WORLD, quick_prices(WORLD), request)
    count = 2 if isinstance(time_assignment(program, 2), TimeAssignment) else 1
    yield "random", lambda: random_plan(program, WORLD, 1, count)


def check(task: str, kind: str) -> tuple[str, str]:
    """Train one model; a word for how it went, and what there is to say."""
    try:
        model, inputs = make_model(task, kind)
    except Exception as error:  # noqa: BLE001  (anything: it is not what is looked at)
        return "not built", f"{type(error).__name__}: {str(error)[:200]}"
    name = ""
    with suppress(AttributeError, ValueError):  # models without experts
        model.set_experts_implementation("grouped_mm")
    try:
        from autopar.api import trace_model  # noqa: PLC0415  (behind the fork, as all that takes memory)

        traced = keep_double_program(trace_model(model, inputs))
        if any(op.is_random for layer in traced.program.layers for op in layer.ops):
            return "random", ""
        alone = run_single(model, inputs, STEPS, in_double=True)
        for name, make in plans_of(traced.program):
            report = compare(alone, run_parallel(model, traced, make(), inputs, STEPS), WORLD)
            worst = report.loss_error, report.worst_gradient[1], report.parameter_error
            if not all(error <= bound for error, bound in zip(worst, (1e-10, 1e-8, 1e-6), strict=True)):
                return "WRONG", f"{name}: {report}"
    except AutoparError as error:
        return "refused", f"{name} {type(error).__name__}: {str(error)[:300]}"
    except Exception:  # noqa: BLE001  (what it is stands in the traceback)
        return "FAILED", f"{name} {traceback.format_exc()[-1500:]}"
    return "equal", ""


def check_apart(task: str, kind: str, seconds: int) -> tuple[str, str]:
    """`check` in a process of its own, with a limit of CPU seconds, and of ten times as many in case it hangs."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.alarm(10 * seconds)
        os.write(write, json.dumps(check(task, kind)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    status = os.waitpid(child, 0)[1]
    if text:
        word, what = json.loads(text)
        return word, what
    return (
        ("too slow", f"{seconds} s")
        if status in (signal.SIGPROF, signal.SIGALRM)
        else ("FAILED", f"the process ended with {status}")
    )


def main() -> None:
    """All classes, in random order so that any part of the list is a sample; then how many there were of each word."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--only", nargs="*", help="model types, such as llama")
    parser.add_argument("--seconds", type=int, default=200, help="CPU seconds for each model")
    parser.add_argument("--json", type=Path, help="a line is added for each model; what stands there is not run again")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = ("autopar", "torch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    print(f"# {' '.join(sys.argv)}: {versions}, Python {platform.python_version()}", flush=True)
    lines = given.json.read_text().splitlines() if given.json and given.json.exists() else []
    known: dict[tuple[str, str], Mapping[str, str]] = {
        (row["task"], row["kind"]): row for row in map(json.loads, lines)
    }
    counts: Counter[str] = Counter()
    for task in given.task:
        kinds = list(getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES"))
        random.Random(0).shuffle(kinds)
        for kind in kinds:
            if given.only and kind not in given.only:
                continue
            row = known.get((task, kind))
            if row is None:
                word, what = check_apart(task, kind, given.seconds)
                row = {"task": task, "kind": kind, "word": word, "what": what}
                if given.json:
                    with given.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            counts[row["word"]] += 1
            print(f"{task} {kind}: {row['word']} {row['what']}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))


if __name__ == "__main__":
    main()
