"""Training steps on one NVIDIA GPU, predicted and measured: ``python benchmarks/accuracy.py gpu [--json]``.

Every case is a process of its own: a small number of layers of a known shape, one plan (recomputation, offload,
microbatches, eager or compiled), compute in bfloat16, parameters and AdamW in float32.  Measured are the step's
seconds and the peak of allocated memory, beside what the plan promises by a profile of this GPU, which is measured
first where there is none.  Cases "by hand" train the same model as torchtitan does: `fully_shard` and ``compile()`` of
each layer, and checkpoints of layers where all is recomputed.  All cases of a model start from equal parameters, so
their first losses say whether they compute the same.

``--output FOLDER`` keeps what was measured in ``FOLDER/steps.json``; ``--measured FILE`` predicts again for such a file
and prints, without a GPU.  ``benchmarks/measured/h200-steps.json`` is one, with its profile beside it.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import autopar
from benchmarks.predictions._live_memory import live_at_peak

_WARM_UP = 3
_STEPS = 8
_LIMIT_S = 240  # a case with its compilation takes a minute
_VOCABULARY = 32000


def _sizes(width: int, inner: int, heads: int, key_heads: int, layers: int, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": key_heads, "num_hidden_layers": layers, "vocab_size": _VOCABULARY,
        "attn_implementation": "sdpa", "use_cache": False, **others,
    }  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model of transformers and its batch.

    Args:
        name: as in transformers: ``<name>Config``.
        head: what follows the name in the model's class.
        sizes: arguments of the config.
        rows: of a batch.
        length: tokens of a row, or the width of an image.
        targets: tokens of a row of labels; None: as many as of input.
    """

    name: str
    head: str
    sizes: dict[str, Any]
    rows: int
    length: int
    targets: int | None = None

    @property
    def takes_images(self) -> bool:
        """Else tokens."""
        return self.head == "ForImageClassification"

    def make(self) -> nn.Module:
        """On the current device, in training mode."""
        torch.manual_seed(0)
        longest = (
            {}
            if self.takes_images or self.name in ("T5", "GPT2", "Bloom")
            else {"max_position_embeddings": self.length}
        )
        config = getattr(transformers, f"{self.name}Config")(**longest, **self.sizes)
        return getattr(transformers, f"{self.name}{self.head}")(config).train()

    def batch(self, device: str) -> dict[str, Tensor]:
        """The same one in every process."""
        generator = torch.Generator().manual_seed(0)
        if self.takes_images:
            images = torch.randn(self.rows, 3, self.length, self.length, generator=generator)
            labels = torch.randint(self.sizes["num_labels"], (self.rows,), generator=generator)
            return {"pixel_values": images.to(device), "labels": labels.to(device)}
        ids = torch.randint(self.sizes["vocab_size"], (self.rows, self.length), generator=generator).to(device)
        return {"input_ids": ids, "labels": ids[:, : self.targets].contiguous()}


_8B = _sizes(4096, 14336, 32, 8, 4)
_1B = _sizes(2048, 8192, 32, 8, 8)
_SMALL = _sizes(768, 2048, 12, 12, 12)
_EXPERTS = _sizes(2048, 3584, 16, 8, 4, num_local_experts=8, num_experts_per_tok=2, experts_implementation="grouped_mm")
_GPT2 = {"vocab_size": 50257, "n_embd": 1600, "n_layer": 6, "n_head": 25, "n_positions": 1024, "use_cache": False}
_BERT = _sizes(1024, 4096, 16, 16, 8, vocab_size=30522)
_T5 = {"vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 6, "num_heads": 16,
       "feed_forward_proj": "gated-gelu", "use_cache": False, "decoder_start_token_id": 0}  # fmt: skip
_GEMMA2 = _sizes(2304, 9216, 8, 4, 4, vocab_size=256000, head_dim=256, attn_implementation="eager")
_QWEN3 = _sizes(2048, 6144, 16, 8, 6, vocab_size=151936, head_dim=128, tie_word_embeddings=True)
_DEEPSEEK = _sizes(
    2048, 5632, 16, 16, 4, moe_intermediate_size=1024, n_routed_experts=16, n_group=4, topk_group=2,
    num_experts_per_tok=4, first_k_dense_replace=1, q_lora_rank=768, kv_lora_rank=512, qk_rope_head_dim=64,
    qk_nope_head_dim=128, v_head_dim=128, experts_implementation="grouped_mm",
)  # fmt: skip
_GPT_OSS = _sizes(
    1440, 1440, 32, 8, 4, head_dim=64, num_local_experts=16, num_experts_per_tok=4, sliding_window=128,
    attn_implementation="eager", experts_implementation="grouped_mm",
)  # fmt: skip
_VIT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "image_size": 224, "patch_size": 14, "num_labels": 1000}  # fmt: skip
_OPT = _sizes(2048, 8192, 32, 32, 6, vocab_size=50272, ffn_dim=8192)
_BLOOM = {"hidden_size": 2048, "n_layer": 6, "n_head": 16, "vocab_size": 250880, "use_cache": False}
_MODERN = _sizes(1024, 2624, 16, 16, 8, vocab_size=50368, attn_implementation="sdpa")
_SWIN = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32], "num_labels": 1000}
_OTHERS = (
    "gpt2", "bert", "t5", "gemma2", "qwen3", "deepseek", "gpt-oss", "convnext", "resnet", "opt", "bloom", "modernbert",
    "swin",
)  # fmt: skip
_MODELS = {
    "8b": Model("Llama", "ForCausalLM", _8B, 1, 8192),
    "8b-batch": Model("Llama", "ForCausalLM", _8B, 4, 4096),
    "8b-long": Model("Llama", "ForCausalLM", _8B, 1, 32768),
    "1b": Model("Llama", "ForCausalLM", _1B, 8, 2048),
    "small": Model("Llama", "ForCausalLM", _SMALL, 8, 1024),
    "experts": Model("Mixtral", "ForCausalLM", _EXPERTS, 2, 4096),
    "vit": Model("ViT", "ForImageClassification", _VIT, 64, 224),
    "gpt2": Model("GPT2", "LMHeadModel", _GPT2, 8, 1024),
    "bert": Model("Bert", "ForMaskedLM", _BERT, 32, 512),
    "t5": Model("T5", "ForConditionalGeneration", _T5, 16, 512, targets=128),
    "gemma2": Model("Gemma2", "ForCausalLM", _GEMMA2, 2, 2048),
    "qwen3": Model("Qwen3", "ForCausalLM", _QWEN3, 4, 2048),
    "deepseek": Model("DeepseekV3", "ForCausalLM", _DEEPSEEK, 2, 4096),
    "gpt-oss": Model("GptOss", "ForCausalLM", _GPT_OSS, 2, 2048),
    "convnext": Model("ConvNext", "ForImageClassification", {"num_labels": 1000}, 128, 224),
    "opt": Model("OPT", "ForCausalLM", _OPT, 4, 2048),
    "bloom": Model("Bloom", "ForCausalLM", _BLOOM, 2, 2048),
    "modernbert": Model("ModernBert", "ForMaskedLM", _MODERN, 16, 1024),
    "swin": Model("Swin", "ForImageClassification", _SWIN, 64, 224),
    "resnet": Model("ResNet", "ForImageClassification", {"num_labels": 1000}, 128, 224),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model and how it is trained.

    Args:
        model: of `_MODELS`.
        constraints: of the search.
        is_compiled: None lets the search choose.
        by_hand: without autopar.
        fused: AdamW as one kernel, as torchtitan has it; else as torch does by default.
        precision: of `autopar.parallelize`.
    """

    model: str
    constraints: tuple[str, ...]
    is_compiled: bool | None
    by_hand: bool = False
    fused: bool = True
    precision: str | None = "bf16"

    @property
    def name(self) -> str:
        """What tells it from the others."""
        how = {True: "compiled", False: "eager", None: "free"}[self.is_compiled]
        words = (
            self.model,
            "by hand" if self.by_hand else "",
            how,
            *self.constraints,
            "" if self.fused else "foreach",
            "" if self.precision else "float32",
        )
        return " ".join(filter(None, words))


def cases() -> list[Case]:
    """All of them, those first that say the most."""
    kept, full = ("recompute=none",), ("recompute=full",)
    return [
        Case("8b", kept, True), Case("8b", kept, True, by_hand=True), Case("8b", (), None),
        Case("8b", kept, True, fused=False), Case("8b", ("offload=activations",), True),
        Case("experts", kept, False), Case("small", kept, False), Case("small", kept, False, by_hand=True),
        Case("8b", ("offload=optimizer", *kept), True), Case("8b", ("offload=optimizer", *kept), True, fused=False),
        Case("8b", full, True),
        Case("8b", full, True, by_hand=True), Case("8b-batch", ("microbatches=4", *kept), True),
        Case("8b-long", (), True), Case("vit", kept, True), Case("vit", kept, True, by_hand=True),
        Case("experts", kept, True), Case("1b", kept, True), Case("1b", kept, True, by_hand=True),
        Case("8b", kept, False), Case("8b", kept, False, by_hand=True), Case("8b", ("recompute=selective",), False),
        Case("8b", full, False), Case("8b", ("offload=activations",), False), Case("small", kept, True),
        *(Case("qwen3", kept, compiled, precision=None) for compiled in (True, False)),
        *(Case(model, kept, compiled) for model in _OTHERS for compiled in (True, False)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What was predicted and measured; `problem` says why not.  Only seconds of one `machine` may be compared."""

    case: str
    device: str = ""
    machine: str = ""
    torch: str = ""
    predicted_s: float = 0.0
    predicted_bytes: float = 0.0
    measured_s: list[float] = field(default_factory=list[float])
    measured_bytes: float = 0.0
    losses: list[float] = field(default_factory=list[float])
    first_step_s: float = 0.0
    setup_s: float = 0.0
    problem: str = ""
    report: str = ""
    kernels: str = ""
    live: str = ""

    @property
    def median_s(self) -> float:
        """Of all steps."""
        return statistics.median(self.measured_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may follow ``accuracy.py gpu``."""
    parser.add_argument("--only", nargs="+", help="cases whose names contain one of these texts")
    parser.add_argument("--output", type=Path, help="a folder for steps.json, and one file per case")
    parser.add_argument("--measured", type=Path, help="a steps.json: predict again, without a GPU")
    parser.add_argument("--profile", type=Path, help="with --measured: prices from this profile, not estimates")
    parser.add_argument("--device", default="h100", help="with --measured: the device of estimates (default h100)")
    parser.add_argument("--kernels", action="store_true", help="keep the kernels of a step that take longest, too")
    parser.add_argument(
        "--live", action="store_true", help="keep what is alive where a step needs the most memory, too"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that start beside the one that has the GPU")
    parser.add_argument("--share", action="store_true", help="all of them use the GPU at once: memory only, no seconds")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, print; returns the exit status."""
    if options.case:
        return _run_case(options)
    chosen = [case for case in cases() if not options.only or any(text in case.name for text in options.only)]
    if options.measured:
        by_name = {case.name: case for case in chosen}
        rows = [Outcome(**row) for row in json.loads(options.measured.read_text())]
        return _print([predict_again(by_name[o.case], o, options) for o in rows if o.case in by_name], options)
    if not torch.cuda.is_available():
        print("no GPU here: this compares real steps on one NVIDIA GPU with what was predicted; run it where "
              "torch.cuda.is_available()", file=sys.stderr)  # fmt: skip
        return 1
    folder = options.output or Path("gpu-steps")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    with ThreadPoolExecutor(options.workers) as pool:
        extra = [f"--{name}" for name in ("kernels", "live", "share") if getattr(options, name)]
        outcomes = list(pool.map(partial(_in_process, folder, extra), chosen))
    (folder / "steps.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return _print(outcomes, options)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name.replace(' ', '_').replace('=', '-')}.json"


def _in_process(folder: Path, extra: list[str], case: Case) -> Outcome:
    command = [sys.executable, str(Path(__file__).parents[1] / "accuracy.py"), "gpu", "--case", case.name,
               "--output", str(folder), *extra]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        said = (done.stderr or done.stdout)[-2000:]
    except subprocess.TimeoutExpired:
        said = f"not done after {_LIMIT_S} s"
    path = _path(folder, case.name)
    outcome = Outcome(**json.loads(path.read_text())) if path.exists() else Outcome(case.name, problem=said)
    print(_line(outcome), flush=True)
    return outcome


def _run_case(options: argparse.Namespace) -> int:
    (case,) = (case for case in cases() if case.name == options.case)
    with (options.output / "gpu.lock").open("w") as lock:
        if not options.share:
            fcntl.flock(lock, fcntl.LOCK_EX)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        torch.cuda.set_device(0)
        outcome = _train(case, options)
        if options.share:
            outcome = replace(outcome, measured_s=[])
        _path(options.output, case.name).write_text(json.dumps(asdict(outcome)))
        dist.destroy_process_group()
        fcntl.flock(lock, fcntl.LOCK_UN)  # processes that compile have the file open as well
    return 0


def _by_hand(case: Case) -> nn.Module:
    """As torchtitan does it: a checkpoint around each layer, each layer compiled, then sharded (on one GPU: cast)."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # noqa: PLC0415
        checkpoint_wrapper,
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    with torch.device("cuda"):
        model: Any = _MODELS[case.model].make()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cuda", (1,))
    layers = model.vit.layers if "vit" in case.model else model.model.layers
    for number, layer in enumerate(layers):
        wrapped = checkpoint_wrapper(layer) if "recompute=full" in case.constraints else layer
        if case.is_compiled:
            wrapped.compile()
        layers[number] = wrapped
        fully_shard(wrapped, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if case.is_compiled:
        model.loss_function = torch.compile(model.loss_function)
    return model


def _train(case: Case, options: argparse.Namespace) -> Outcome:
    started = time.perf_counter()
    batch = _MODELS[case.model].batch("cuda")
    if case.by_hand:
        model: Any = _by_hand(case)
        predicted_s = predicted_bytes = 0.0
    else:
        with torch.device("meta"):
            whole = _MODELS[case.model].make()
        torch.manual_seed(0)
        model = autopar.parallelize(
            whole, init_device_mesh("cuda", (1,)), batch, precision=case.precision, constraints=case.constraints,
            compile=case.is_compiled,
        )  # fmt: skip
        predicted_s, predicted_bytes = model.plan.step_time_s, model.plan.peak_memory_bytes
    setup_s = time.perf_counter() - started
    gc.collect()
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True if case.fused else None)
    losses: list[float] = []

    def step() -> float:
        torch.cuda.synchronize()
        before = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - before
        losses.append(loss.item())
        return seconds

    first_s = step()
    for _ in range(_WARM_UP - 1):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = [step() for _ in range(_STEPS)]
    peak_bytes = float(torch.cuda.max_memory_allocated())
    return Outcome(
        case=case.name, device=torch.cuda.get_device_name(), machine=str(torch.cuda.get_device_properties(0).uuid),
        torch=torch.__version__, predicted_s=predicted_s, predicted_bytes=predicted_bytes, measured_s=seconds,
        measured_bytes=peak_bytes, losses=losses[:4], first_step_s=first_s, setup_s=setup_s,
        report=_report(case, model, step), kernels=_kernels(step) if options.kernels else "",
        live=live_at_peak(step) if options.live else "",
    )  # fmt: skip


def _report(case: Case, model: Any, step: Any) -> str:
    if case.by_hand:
        return ""
    try:
        return str(model.report(step))
    except Exception as error:  # noqa: BLE001  (the measurement is kept all the same)
        return f"{type(error).__name__}: {error}"


def _kernels(step: Any) -> str:
    """The kernels of a step that take longest."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
    return found.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)


def predict_again(case: Case, outcome: Outcome, options: argparse.Namespace) -> Outcome:
    """With the present code's prices."""
    if case.by_hand or outcome.problem:
        return outcome
    with torch.device("meta"):
        model = _MODELS[case.model].make()
    plan = autopar.plan(
        model, autopar.Cluster.of(options.device, devices_per_node=1), _MODELS[case.model].batch("cpu"),
        precision=case.precision, constraints=case.constraints, compile=case.is_compiled,
        profile=options.profile or False,
    )  # fmt: skip
    return Outcome(**asdict(outcome) | {"predicted_s": plan.step_time_s, "predicted_bytes": plan.peak_memory_bytes})


def _line(o: Outcome) -> str:
    if o.problem:
        return f"{o.case:<42} {o.problem.strip().splitlines()[-1] if o.problem.strip() else 'failed'}"
    seconds = " " * 36
    if o.measured_s:
        ratio = f"{o.predicted_s / o.median_s:>6.2f}" if o.predicted_s else f"{'':>6}"
        spread = (max(o.measured_s) - min(o.measured_s)) / o.median_s
        seconds = f"{o.predicted_s * 1e3:>8.1f} {o.median_s * 1e3:>8.1f} ms {ratio} (spread {spread:.0%})"
    room = f"{o.predicted_bytes / o.measured_bytes:>6.2f}" if o.predicted_bytes else f"{'':>6}"
    return (f"{o.case:<42} {seconds} "
            f"{o.predicted_bytes / 2**30:>6.2f} {o.measured_bytes / 2**30:>6.2f} GiB {room}  first step "
            f"{o.first_step_s:.0f} s, loss {o.losses[0]:.4f} {o.losses[-1]:.4f}  {o.machine[:12]}")  # fmt: skip


def _print(outcomes: list[Outcome], options: argparse.Namespace) -> int:
    print(f"{'case':<42} {'predicted':>8} {'measured':>8}    ratio")
    for outcome in outcomes:
        print(_line(outcome))
    done = [o for o in outcomes if not o.problem and o.predicted_s]
    if not done:
        return 1
    timed = [abs(o.predicted_s / o.median_s - 1) for o in done if o.measured_s]
    seconds = statistics.median(timed) if timed else float("nan")
    room = statistics.median(abs(o.predicted_bytes / o.measured_bytes - 1) for o in done)
    print(
        f"median absolute error: step time {seconds:.1%}, peak memory {room:.1%}, over "
        f"{len(timed)} and {len(done)} plans"
    )
    if options.json:
        print(json.dumps({"median_absolute_error": {"s": seconds, "bytes": room}, "cases": len(done)}))
    return 0
