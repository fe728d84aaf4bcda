"""Which models of transformers train as on one device: every class that makes a loss, small and with random weights.

    python benchmarks/architectures.py [--task causal ...] [--only llama ...] [--seconds 200] [--json FILE]

Each class is built from its own configuration with 2 layers, 32 hidden units and little of the rest; what
can't be built so, or doesn't run on one device with the inputs made up here, is counted apart.  What runs is traced
and trained for two steps in float64 on four simulated ranks: by the plan of a free search (or, where stages are exact,
of one for two stages), and by a random plan.  Its loss must be within 1e-10 of one device's, gradients within 1e-8,
parameters after the steps within 1e-6, relative: batch norm over four values after a ReLU magnifies rounding so much.
Models that draw random numbers in training are not compared, as ranks draw others than one device.

With ``--stand-in`` each is trained for two steps in float32 on one device that is no CPU (`tests.stand_in_device`), on
which ops on tensors of two devices fail as on a GPU; losses must be within 1e-3 of those on the CPU.
"""

from __future__ import annotations

import argparse
import copy
import inspect
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

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only
from transformers.models.auto import modeling_auto

import autopar
from autopar.errors import AutoparError
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.search.microbatches.time_assignment import TimeAssignment, time_assignment
from autopar.verify import compare
from autopar.verify.rehearsal import keep_double_program, run_parallel, run_single
from tests import stand_in_device
from tests.random_plans import random_plan
from tests.zoo import quick_prices

WORLD, STEPS, BATCH, LENGTH, VOCABULARY = 4, 2, 8, 16, 64
LARGEST = 60e6  # parameters: what is larger is no small model, and takes minutes
TASKS = {
    "causal": "CAUSAL_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM", "masked": "MASKED_LM", "text": "SEQUENCE_CLASSIFICATION",
    "image": "IMAGE_CLASSIFICATION", "segmentation": "SEMANTIC_SEGMENTATION", "ctc": "CTC",
    "audio": "AUDIO_CLASSIFICATION", "question": "QUESTION_ANSWERING", "token": "TOKEN_CLASSIFICATION",
    "choice": "MULTIPLE_CHOICE", "image_text": "IMAGE_TEXT_TO_TEXT", "detection": "OBJECT_DETECTION",
    "depth": "DEPTH_ESTIMATION", "video": "VIDEO_CLASSIFICATION", "masked_image": "MASKED_IMAGE_MODELING",
    "pairs": "ZERO_SHOT_IMAGE_CLASSIFICATION", "speech": "SPEECH_SEQ_2_SEQ", "xvector": "AUDIO_XVECTOR",
}  # fmt: skip
WIDTHS = (
    (r"(num_key_value_heads|n_kv_heads?|num_kv_heads|multi_query_group_num)$", 2),
    (r"(attention_heads|num_heads|n_heads?|_heads)$", 4),
    (r"^(hidden_size|n_embd|d_model|dim|embed_dim|embedding_size|hidden_dim|word_embed_proj_dim|emb_dim|d_embed)$", 32),
    (r"^(out_hidden_size|projection_dim|vision_output_dim)$", 32),
    (r"(intermediate_size|d_ff|ffn_dim|n_inner|d_inner|ffn_hidden_size|intermediate_size_mlp)$", 64),
    (r"(head_dim|d_kv|kv_channels)$", 8),
    (r"^(kv_lora_rank|q_lora_rank)$", 16),
    (r"^rotary_dim$", 4),
)
OTHERS = (
    (r"^(num_hidden_layers|n_layers?|num_layers|depth|(num_)?(en|de)coder_layers|n_(en|de)coder_layers)$", 2),
    (r"vocab_size$", VOCABULARY),
    (r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts)$", 4),
    (r"^(num_experts_per_tok|moe_k|num_experts_per_token|moe_topk|top_k_experts)$", 2),
    (r"^(n_group|topk_group|first_k_dense_replace)$", 1),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)$", 64),
    (r"(dropout|pdrop|drop_prob|drop_rate|drop_path_rate|layerdrop|dropout_rate|dropout_prob|dropout_p)$", 0.0),
    (r"_token_(id|index)$", 2),  # of images, of which there are as many as features
    (r"^mask_(time|feature)_prob$", 0.0),  # which frames are masked is drawn by NumPy
    (r"(pad|bos|eos|sep|cls|mask|decoder_start)_token_id$", 1),
    (r"^(sliding_window|attention_window_size|attention_chunk_size)$", 8),
)
IMAGE = ((r"^image_size$", 32), (r"^patch_size$", 8), (r"^mm_tokens_per_image$", 4), (r"^num_image_tokens$", 16))
BUILDS = (WIDTHS + OTHERS + IMAGE, (*WIDTHS[:5], *OTHERS, *IMAGE), OTHERS + IMAGE, (*OTHERS, (r"^image_size$", 96)))
"""What is made small: everything; all but the size of heads; no widths; convolutions need larger images."""


def small_values(config: Any, rules: tuple[tuple[str, float], ...], depth: int = 0) -> dict[str, Any]:
    """The numbers of a configuration, and of those inside it, that some rule makes smaller."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig) and depth < 2:
            values[name] = small_values(value, rules, depth + 1)
        elif isinstance(value, dict) and "mrope_section" in value:  # halves of a head, for time, height and width
            values[name] = {**value, "mrope_section": [2, 1, 1]}
        elif (name == "image_size" and isinstance(value, (list, tuple))) or name == "conv_dim":
            values[name] = [32] * len(value)
        elif name == "vocab_size" or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            small = next((small for pattern, small in rules if re.search(pattern, name)), None)
            values |= {name: small} if small is not None else {}
    kinds = getattr(config, "layer_types", None)
    if kinds and "num_hidden_layers" in values:  # one layer of each kind
        distinct = list(dict.fromkeys(kinds))
        count = values["num_hidden_layers"] = max(2, len(distinct))
        values["layer_types"] = (distinct * count)[:count]
    if hasattr(config, "kv_lora_rank") and "num_key_value_heads" in values:  # latent attention has as many as queries
        values["num_key_value_heads"] = values.get("num_attention_heads", config.num_attention_heads)
    return values


def make_model(task: str, kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The first build that runs on one device; the errors of all if none does."""
    errors: dict[str, Exception] = {}
    name = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")[kind]
    config_class = transformers.CONFIG_MAPPING[kind]
    for rules in BUILDS:
        try:
            config = config_class(**small_values(config_class(), rules))
            if task == "causal" and not hasattr(config, "vocab_size"):
                config = config.get_text_config()
            config.use_cache = False
            model_class = getattr(transformers, name if isinstance(name, str) else name[0])
            with torch.device("meta"):  # some take a minute to be made whole
                if sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters()) > LARGEST:
                    raise ValueError("too large")
            torch.manual_seed(0)
            model = model_class(config).train()
            inputs = make_inputs(task, model)
            loss = model(**inputs).loss
            if not loss.isfinite():
                raise ValueError(f"the loss is {loss.item()}")
            loss.backward()
        except Exception as error:  # noqa: BLE001  (anything: the next build may do)
            errors |= {f"{type(error).__name__}: {str(error)[:150]}": error}
        else:
            model.zero_grad(set_to_none=True)
            return model.double(), tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
    raise ExceptionGroup("; ".join(errors), list(errors.values()))


def make_inputs(task: str, model: Any) -> dict[str, Any]:
    """A batch for this task, in float32."""
    generator = torch.Generator().manual_seed(1)

    def ids(*shape: int, most: int = VOCABULARY) -> Tensor:
        return torch.randint(3 if most > 3 else 0, most, shape, generator=generator)

    if task in IMAGE_LABELS:
        images = image_inputs(model.config, generator, frames=task == "video")
        size = images["pixel_values"].shape[-1]
        return images | IMAGE_LABELS[task](ids, size, model.config)
    if task in ("ctc", "audio", "xvector", "speech"):
        is_wave = model.main_input_name == "input_values"
        shape = (BATCH, 4000) if is_wave else (BATCH, 64, num_audio_features(model.config))
        if task == "speech" and not is_wave and "whisper" in model.config.model_type:
            shape = (BATCH, shape[-1], 2 * model.config.max_source_positions)
        labels = ids(BATCH, 4, most=30) if task in ("ctc", "speech") else ids(BATCH, most=2)
        return {model.main_input_name: torch.randn(shape, generator=generator), "labels": labels}
    if task == "image_text":
        return image_text_inputs(model, ids(BATCH, LENGTH), image_inputs(model.config, generator))
    tokens = ids(BATCH, 2, LENGTH) if task == "choice" else ids(BATCH, LENGTH)
    if task == "pairs":
        return {"input_ids": tokens, "return_loss": True, **image_inputs(model.config, generator)}
    if task == "question":
        return {"input_ids": tokens, "start_positions": ids(BATCH, most=8), "end_positions": ids(BATCH, most=8)}
    labels = {"text": (BATCH,), "choice": (BATCH,), "token": (BATCH, LENGTH)}
    if task in labels:
        return {"input_ids": tokens, "labels": ids(*labels[task], most=2)}
    return {"input_ids": tokens, "labels": ids(BATCH, LENGTH // 2) if task == "seq2seq" else tokens}


IMAGE_LABELS: dict[str, Callable[..., dict[str, Any]]] = {
    "image": lambda ids, size, _: {"labels": ids(BATCH, most=2)},
    "video": lambda ids, size, _: {"labels": ids(BATCH, most=2)},
    "segmentation": lambda ids, size, _: {"labels": ids(BATCH, size, size, most=2)},
    "depth": lambda ids, size, _: {"labels": ids(BATCH, size, size, most=9).float()},
    "masked_image": lambda ids, size, config: {
        "bool_masked_pos": ids(BATCH, (size // config.patch_size) ** 2, most=2).bool()
    },
    "detection": lambda ids, size, _: {
        "labels": [{"class_labels": ids(2, most=2), "boxes": ids(2, 4, most=9) / 20 + 0.1} for _ in range(BATCH)]
    },
}
"""What a model of images is trained to say, by task."""


def image_inputs(config: Any, generator: torch.Generator, *, frames: bool = False) -> dict[str, Any]:
    """Images, or clips, of the size that the configuration says."""
    config = getattr(config, "vision_config", None) or config
    sizes = getattr(config, "image_size", None) or 64
    size = sizes if isinstance(sizes, int) else sizes[0]
    channels = getattr(config, "num_channels", None) or 3
    shape = (BATCH, getattr(config, "num_frames", None) or 8) if frames else (BATCH,)
    return {"pixel_values": torch.randn(*shape, channels, size, size, generator=generator)}


def image_text_inputs(model: Any, tokens: Tensor, images: dict[str, Any]) -> dict[str, Any]:
    """Texts that begin with an image each, with as many image tokens as the model wants."""
    config = model.config
    place = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    with_sizes = "image_grid_thw" in inspect.signature(model.forward).parameters
    if with_sizes:  # patches of all images one after another, and how many there are of each
        vision = config.vision_config
        numbers = (getattr(vision, "in_channels", None) or 3) * vision.patch_size**2
        numbers *= getattr(vision, "temporal_patch_size", 1)
        images = {
            "pixel_values": torch.randn(BATCH * 16, numbers, generator=torch.Generator().manual_seed(2)),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        }
    elif hasattr(config, "scale_factor"):  # of several images for each text
        images = {name: x[:, None] for name, x in images.items()}
    error: Exception | None = None
    for count in (4, 16, *range(1, 66)):
        marks = torch.full((BATCH, count if place is not None else 0), place or 0)
        ids = torch.cat([marks, tokens], 1)
        inputs = {"input_ids": ids, "labels": ids.masked_fill(ids == place, -100), **images}
        for name in {"mm_token_type_ids", "token_type_ids"} & inspect.signature(model.forward).parameters.keys():
            inputs |= {name: (ids == place).long()}
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as new:  # noqa: BLE001  (models say in many ways that the count is wrong)
            error = error or new
        else:
            return inputs
    raise error or AssertionError


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
        return "not built", f"{type(error).__name__}: {str(error)[:600]}"
    name = ""
    with suppress(AttributeError, ValueError):  # models without experts
        model.set_experts_implementation("grouped_mm")
    try:
        from autopar.planning.call_traces import trace_model  # noqa: PLC0415  (behind the fork, as all that takes memory)

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


def check_on_stand_in(task: str, kind: str) -> tuple[str, str]:
    """Train one model on a device that is no CPU; what `check` returns."""
    try:
        model, inputs = make_model(task, kind)
    except Exception as error:  # noqa: BLE001  (anything: it is not what is looked at)
        return "not built", f"{type(error).__name__}: {str(error)[:600]}"
    model = model.float()
    inputs = tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, inputs)
    try:
        alone, again = (losses_of(copy.deepcopy(model), inputs) for _ in range(2))
    except Exception as error:  # noqa: BLE001  (as above)
        return "doesn't run", f"{type(error).__name__}: {str(error)[:300]}"
    dist.init_process_group(stand_in_device.BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    moved = tree_map_only(Tensor, lambda x: x.to(stand_in_device.NAME), inputs)
    mesh = init_device_mesh(stand_in_device.NAME, (1,))
    try:
        parallel = autopar.parallelize(copy.deepcopy(model), mesh, moved, profile=False, compile=False)
        found = losses_of(parallel, moved)
    except AutoparError as error:
        return "refused", f"{type(error).__name__}: {str(error)[:300]}"
    except Exception:  # noqa: BLE001  (what it is stands in the traceback)
        return "FAILED", traceback.format_exc()[-1500:]
    if alone != again:
        return "random", "trained, and not compared"
    return ("equal", "") if found == pytest.approx(alone, rel=1e-3) else ("WRONG", f"{alone} {found}")


def losses_of(model: nn.Module, inputs: dict[str, Any]) -> list[float]:
    """Of two steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(STEPS):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_apart(check: Callable[[str, str], tuple[str, str]], task: str, kind: str, seconds: int) -> tuple[str, str]:
    """What `check` says, in a process of its own; it may take so many CPU seconds, and ten times as long in case it
    hangs.
    """
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
    parser.add_argument("--stand-in", action="store_true", help="on one device that is no CPU")
    parser.add_argument("--json", type=Path, help="a line is added for each model; what stands there is not run again")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if given.stand_in:  # before the first backward, in which torch counts its devices
        stand_in_device.register("Ascend910B4")
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
                word, what = check_apart(check_on_stand_in if given.stand_in else check, task, kind, given.seconds)
                row = {"task": task, "kind": kind, "word": word, "what": what}
                if given.json:
                    with given.json.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            counts[row["word"]] += 1
            print(f"{task} {kind}: {row['word']} {row['what']}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.most_common()))


if __name__ == "__main__":
    main()
