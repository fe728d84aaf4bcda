"""What a rank allocates: ``python benchmarks/accuracy.py memory [--only TEXT] [--json]``.

Trains small models of real proportions by forced plans, every rank a thread of this process, and watches every storage
that an op makes (`_allocations`): parameters, gradients, optimizer state, saved activations, the peak of the second
step.  Each is printed beside what the plan says.  ``--json`` ends with one line of mean absolute errors.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.errors import AutoparError
from autopar.lower import ParallelModule
from autopar.lower.autograd import run_backward
from autopar.lower.communication.buckets import BucketHandle
from autopar.lower.communication.collectives import Handle
from autopar.lower.communication.simulated_ranks import ThreadCommunicator
from autopar.lower.parameters.host_storage import HostCopies
from autopar.lower.parameters.layer_parameters import LayerParameters, StepParameters
from autopar.lower.program import offloading
from autopar.lower.program.offloading import OffloadedTensors
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.planning.arguments import read_dtype, training_spec
from autopar.planning.call_traces import trace_model
from autopar.planning.logits import search_plan
from autopar.search import SearchRequest, search
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.simulation.step_memory import peak_bytes, step_memory
from autopar.timeline import MEMORY_KINDS
from autopar.verify.rehearsal import loss_of, run_ranks
from benchmarks.predictions._allocations import AllocationTracker, Usage
from benchmarks.predictions._held_out_models import HELD_OUT_MODELS

Model = tuple[nn.Module, dict[str, Any]]
KINDS = MEMORY_KINDS
COMPARED = KINDS[:4]
HOST = "host memory"


@dataclass(frozen=True)
class Case:
    """One measurement: a model, devices, and what the plan must do."""

    model: str
    world: int
    constraints: tuple[str, ...]
    precision: str | None = None

    @property
    def title(self) -> str:
        """For a row of the table."""
        return ", ".join((f"{self.model} on {self.world}", *self.constraints, *filter(None, [self.precision])))


def _ids(batch: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def _gpt2() -> Model:
    config = transformers.GPT2Config(
        vocab_size=2048, n_embd=128, n_layer=4, n_head=4, n_positions=128, resid_pdrop=0.1, embd_pdrop=0.1,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = _ids(8, 128, 2048)
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def _llama() -> Model:
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    ids = _ids(8, 128, 1024)
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


class _Masked(nn.Module):
    """A loss of each token, masked, of logits that are made with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        gpt2: Any = _gpt2()[0]
        self.body = gpt2.transformer

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        body: Any = self.body
        logits: Tensor = body(input_ids).last_hidden_state[:, :-1] @ body.wte.weight.t()
        each = nn.functional.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none")
        return (each * mask[:, 1:]).sum() / mask.sum() + 1e-4 * logits.logsumexp(-1).square().mean()


def _masked() -> Model:
    return _Masked(), {"input_ids": _ids(8, 128, 2048), "mask": torch.ones(8, 128)}


def _bert() -> Model:
    config = transformers.BertConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = _ids(8, 64, 1024)
    mask = torch.ones(8, 64, dtype=torch.int64)
    mask[:, 48:] = (torch.arange(8) % 2)[:, None]
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _vit() -> Model:
    config = transformers.ViTConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, image_size=64, patch_size=8,
        num_labels=16,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(8)}


def _t5() -> Model:
    config = transformers.T5Config(
        vocab_size=1024, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    ids = _ids(8, 64, 1024)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :32].contiguous()}


class _Level(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1), nn.GroupNorm(8, width), nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class _UNet(nn.Module):
    """Two levels down and up again, with skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = _Level(3, width, 1)
        self.down = nn.ModuleList([_Level(width, 2 * width, 2), _Level(2 * width, 4 * width, 2)])
        self.up = nn.ModuleList([_Level(6 * width, 2 * width, 1), _Level(3 * width, width, 1)])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x, skips = self.first(image), list[Tensor]()
        for level in self.down:
            skips.append(x)
            x = level(x)
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = level(torch.cat([x, skips.pop()], dim=1))
        return nn.functional.cross_entropy(self.head(x), target)


def _unet() -> Model:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, 32, 32, generator=generator)
    return _UNet(), {"image": images, "target": torch.randint(0, 4, (8, 32, 32), generator=generator)}


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2": _gpt2, "masked": _masked, "llama": _llama, "bert": _bert, "vit": _vit, "t5": _t5, "unet": _unet,
}  # fmt: skip

CASES: tuple[Case, ...] = (
    Case("gpt2", 1, ()),
    Case("gpt2", 2, ("data=2", "zero=0")),
    Case("gpt2", 2, ("tensor=2",)),
    Case("gpt2", 2, ("data=2", "zero=1")),
    Case("gpt2", 2, ("data=2", "zero=3")),
    Case("gpt2", 2, ("data=2", "zero=1", "microbatches=4")),
    Case("gpt2", 2, ("data=2", "zero=3", "microbatches=2"), "bf16"),
    Case("llama", 2, ("data=2", "zero=0"), "bf16"),
    Case("llama", 2, ("data=2", "zero=2", "microbatches=2")),
    Case("llama", 2, ("data=2", "zero=3", "recompute=selective")),
    Case("llama", 2, ("data=2", "zero=3", "recompute=full")),
    Case("llama", 2, ("tensor=2", "recompute=selective")),
    Case("llama", 4, ("mesh=2x2", "data=2", "tensor=2", "zero=1")),
    Case("llama", 2, ("pipeline=2", "schedule=1f1b", "microbatches=4")),
    Case("llama", 4, ("pipeline=2", "data=2", "zero=1", "schedule=1f1b", "microbatches=4", "recompute=full")),
    Case("llama", 2, ("pipeline=2", "schedule=zbv", "stages=4", "microbatches=4")),
    Case("bert", 2, ("data=2", "zero=0")),
    Case("bert", 2, ("tensor=2", "recompute=selective")),
    Case("bert", 2, ("data=2", "zero=3", "recompute=full"), "bf16"),
    Case("vit", 2, ("data=2", "zero=0")),
    Case("vit", 2, ("data=2", "zero=2", "recompute=selective")),
    Case("vit", 2, ("tensor=2",), "bf16"),
    Case("t5", 2, ("data=2", "zero=0")),
    Case("t5", 2, ("data=2", "zero=3", "recompute=selective")),
    Case("t5", 2, ("pipeline=2", "schedule=gpipe", "microbatches=2")),
    Case("llama", 2, ("data=2", "zero=0", "recompute=none", "offload=activations")),
    Case("llama", 2, ("data=2", "zero=3", "recompute=selective", "offload=activations"), "bf16"),
    Case("llama", 2, ("tensor=2", "recompute=full", "offload=activations")),
    Case("llama", 2, ("data=2", "zero=0", "recompute=ops")),
    Case("gpt2", 2, ("data=2", "zero=1", "microbatches=2", "recompute=none", "offload=activations")),
    Case("gpt2", 2, ("pipeline=2", "schedule=1f1b", "microbatches=4", "recompute=full", "offload=activations")),
    Case("bert", 2, ("pipeline=2", "schedule=zbv", "stages=4", "microbatches=4", "offload=activations")),
    Case("t5", 2, ("data=2", "zero=2", "recompute=none", "offload=activations")),
    Case("llama", 2, ("data=2", "zero=0", "offload=optimizer")),
    Case("llama", 2, ("data=2", "zero=3", "offload=optimizer"), "bf16"),
    Case("llama", 2, ("data=2", "zero=1", "microbatches=2", "offload=optimizer", "gradients=bf16"), "bf16"),
    Case("gpt2", 2, ("data=2", "zero=2", "microbatches=2", "recompute=none", "offload=optimizer")),
    Case("gpt2", 2, ("pipeline=2", "schedule=1f1b", "microbatches=4", "recompute=full", "offload=optimizer")),
    Case("bert", 2, ("tensor=2", "offload=optimizer")),
    Case("t5", 2, ("data=2", "zero=1", "offload=optimizer", "offload=activations")),
    Case("gpt2", 1, ("logits=128",)),
    Case("gpt2", 2, ("data=2", "zero=1", "logits=128")),
    Case("gpt2", 2, ("tensor=2", "logits=100")),
    Case("gpt2", 2, ("data=2", "zero=3", "microbatches=2", "logits=128"), "bf16"),
    Case("gpt2", 2, ("pipeline=2", "schedule=1f1b", "microbatches=4", "logits=128")),
    Case("llama", 2, ("data=2", "zero=3", "recompute=full", "logits=64")),
    Case("masked", 1, ("logits=128",)),
    Case("masked", 2, ("tensor=2", "logits=100")),
    Case("masked", 2, ("data=2", "zero=3", "logits=128"), "bf16"),
    Case("llama", 2, ("context=2",)),
    Case("llama", 2, ("context=2",), "bf16"),
    Case("llama", 4, ("context=2", "sequence=2")),
    Case("llama", 4, ("context=4", "zero=3", "recompute=full")),
    Case("bert", 2, ("context=2",)),
    Case("mixtral", 2, ("expert=2",)),  # with the routing that random weights give
    Case("mixtral", 4, ("expert=4",)),
    Case("deepseek_v3", 2, ("expert=2",)),  # likewise; its shared experts compute while tokens travel
    Case("deepseek_v3", 4, ("expert=4",)),
    Case("unet", 2, ("data=2", "zero=0")),
    Case("unet", 2, ("data=2", "zero=3", "recompute=full")),
)

HELD_OUT_CASES: tuple[Case, ...] = (
    Case("qwen2", 2, ("data=2", "zero=3")),
    Case("qwen2", 2, ("tensor=2",)),
    Case("mistral", 2, ("data=2", "zero=2", "microbatches=2")),
    Case("mistral", 2, ("pipeline=2", "schedule=1f1b", "microbatches=4")),
    Case("gemma2", 1, ()),
    Case("gemma2", 1, ("logits=64",)),
    Case("gemma2", 2, ("tensor=2", "logits=64")),
    Case("gemma2", 2, ("data=2", "zero=1")),
    Case("mistral", 2, ("context=2",)),
    Case("phi", 2, ("tensor=2", "recompute=selective")),
    Case("phi", 2, ("data=2", "zero=0"), "bf16"),
    Case("opt", 2, ("pipeline=2", "schedule=gpipe", "microbatches=2")),
    Case("opt", 2, ("data=2", "zero=3", "recompute=selective")),
    Case("bloom", 2, ("data=2", "zero=0")),
    Case("bloom", 2, ("data=2", "zero=3", "recompute=full")),
    Case("falcon", 2, ("data=2", "zero=2")),
    Case("falcon", 2, ("data=2", "zero=1", "microbatches=2")),
    Case("gpt_neox", 2, ("data=2", "zero=3", "recompute=full")),
    Case("gpt_neox", 2, ("tensor=2",), "bf16"),
    Case("mixtral", 1, ()),
    Case("mixtral", 2, ("data=2", "zero=3")),
    Case("swin", 2, ("data=2", "zero=0")),
    Case("swin", 2, ("data=2", "zero=3", "recompute=full")),
    Case("convnext", 2, ("data=2", "zero=0")),
    Case("convnext", 2, ("data=2", "zero=2", "recompute=selective")),
    Case("resnet", 1, ()),
    Case("resnet", 2, ("data=2", "zero=1")),
    Case("whisper", 2, ("data=2", "zero=0")),
    Case("whisper", 2, ("data=2", "zero=3", "microbatches=2")),
    Case("bart", 2, ("tensor=2",)),
    Case("bart", 2, ("pipeline=2", "schedule=1f1b", "microbatches=4", "recompute=full")),
    Case("clip", 1, ()),
    Case("clip", 2, ("data=2", "zero=3")),
    Case("deberta", 1, ()),
    Case("deberta", 2, ("data=2", "zero=1")),
    Case("perceptron", 2, ("data=2", "zero=1", "microbatches=4")),
    Case("perceptron", 2, ("tensor=2", "recompute=full")),
    Case("separable", 1, ()),
    Case("separable", 2, ("data=2", "zero=3")),
)


@dataclass(frozen=True)
class Outcome:
    """What was predicted and measured on the rank that holds most: the most bytes of each kind, and of all together."""

    case: Case
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    predicted_peak: float
    measured_peak: float

    def ratio(self, kind: str) -> float:
        """Predicted over measured bytes."""
        return self.predicted[kind] / self.measured[kind] if self.measured[kind] else float("inf")


def measure(case: Case) -> Outcome:
    """Plan, train two steps on simulated ranks, and compare."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return measure_model(case, *(MODELS | HELD_OUT_MODELS)[case.model]())


def measure_model(case: Case, model: nn.Module, inputs: dict[str, Any]) -> Outcome:
    """`measure` of a model that `case` only names."""
    traced = trace_model(model, inputs, dtype=read_dtype(case.precision))
    prices = ClusterPrices(Cluster.of("cpu", devices_per_node=case.world), None)
    training = training_spec(model, "adamw").on_device(prices.device)
    request = SearchRequest(64e9, training, case.constraints, schedules=schedule_actions)
    plan = search_plan(
        False, lambda own, asked: search(own, case.world, prices, asked), traced.program, prices, request, case.world
    )  # fmt: skip
    traced = traced.decided_by(plan.decisions)
    with _noting_transport(), _noting_copies(), _noting_sums(), _noting_offloads():
        usages = run_ranks(model, traced, plan, lambda parallel: _watch_step(parallel, inputs))
    fullest = max(range(case.world), key=lambda rank: usages[rank].peak_bytes)
    layers = PlannedLayers(traced.program, plan.decisions)
    memory = step_memory(layers, training.by(plan.decisions), schedule_actions)[fullest // plan.group_size]
    predicted = {kind: max(moment.num_bytes[i] for moment in memory) for i, kind in enumerate(KINDS)}
    # As they are told apart in what is measured: what a backward finds.
    predicted[HOST] = max(moment.host_bytes for moment in memory)
    predicted["saved activations"] = max(m.num_bytes[3] for m in memory if m.part == "backward" and not m.is_after)
    return Outcome(case, predicted, usages[fullest].most, peak_bytes(memory), usages[fullest].peak_bytes)


_WATCHED: dict[int, AllocationTracker] = {}  # by thread: a rank is one


def _tracker() -> AllocationTracker | None:
    return _WATCHED.get(threading.get_ident())


def _watch_step(parallel: ParallelModule, inputs: Mapping[str, Any]) -> Usage:
    """What the second of two steps holds."""
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], lr=1e-3)
    tracker = AllocationTracker()
    is_away = parallel.plan.decisions.host_storage
    for tensor in parallel.parameters():
        tracker.add(tensor, HOST if is_away else "parameters")
    for tensor in parallel.buffers():
        tracker.add(tensor, "parameters")
    for tensor in inputs.values():
        if isinstance(tensor, Tensor):
            tracker.add(tensor, "saved activations")
    _WATCHED[threading.get_ident()] = tracker
    try:
        with tracker:
            _train_step(parallel, inputs, optimizer, tracker)
            begin = tracker.now
            _train_step(parallel, inputs, optimizer, tracker)
        host = tracker.usage((HOST,), begin)
        usage = tracker.usage(KINDS, begin)
        return replace(usage, most={**usage.most, **host.most})
    finally:
        del _WATCHED[threading.get_ident()]


def _train_step(
    parallel: ParallelModule, inputs: Mapping[str, Any], optimizer: torch.optim.Optimizer, tracker: AllocationTracker
) -> None:
    optimizer.zero_grad()
    loss = loss_of(parallel(**inputs))
    for runner in parallel.layer_runners:  # what is computed from buffers is new in every step
        for _, part in runner.constants:
            tracker.add(part(), "parameters")
    run_backward(loss)
    for parameter in parallel.parameters():
        if parameter.grad is not None:
            tracker.add(parameter.grad, "gradients")
    with tracker.making(HOST if parallel.plan.decisions.host_storage else ""):
        optimizer.step()
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor):
                tracker.add(tensor, "optimizer state")


@contextmanager
def _noting_copies() -> Generator[None]:
    """Inside, gathered and cast parameters are known as such."""
    finish = LayerParameters.finish_gather

    def noted(self: LayerParameters, parameters: Sequence[Tensor], handle: BucketHandle | None) -> list[Tensor]:
        copies = finish(self, parameters, handle)
        tracker = _tracker()
        if tracker is not None:
            for copy in copies:
                tracker.add(copy, "gathered parameters")
        return copies

    LayerParameters.finish_gather = noted
    try:
        yield
    finally:
        LayerParameters.finish_gather = finish


def _added_up(parameters: StepParameters) -> Iterator[Tensor | None]:
    # pyright: reportPrivateUsage=false
    if parameters._adds_up:
        yield from (leaf.grad for leaf in parameters._leaves or ())
        yield from parameters._sums or ()


@contextmanager
def _noting_sums() -> Generator[None]:
    """Inside, what microbatches add up is known as gradients."""
    end, finish = StepParameters.end_backward, StepParameters.finish_reduce

    def note(gradients: Iterable[Tensor | None]) -> None:
        tracker = _tracker()
        for gradient in gradients:
            if tracker is not None and gradient is not None:
                tracker.add(gradient, "gradients")

    def noted_end(self: StepParameters) -> None:
        end(self)
        note(_added_up(self))

    def noted_finish(self: StepParameters) -> list[Tensor | None]:
        terms = finish(self)
        note(terms)
        return terms

    StepParameters.end_backward, StepParameters.finish_reduce = noted_end, noted_finish
    try:
        yield
    finally:
        StepParameters.end_backward, StepParameters.finish_reduce = end, finish


@contextmanager
def _noting_transport() -> Generator[None]:
    """Inside, of what simulated collectives allocate only the result counts, as with a real process group."""
    names = ("_start_gather", "_start_scatter_sum", "_start_reduce", "_start_exchange", "_start_broadcast")
    originals = {name: getattr(ThreadCommunicator, name) for name in (*names, "_start_send", "_start_receive")}

    def watched(name: str) -> Callable[..., Handle]:
        def start(self: ThreadCommunicator, *args: Any) -> Handle:
            tracker = _tracker()
            if tracker is None:
                return originals[name](self, *args)
            with tracker.paused():
                handle = originals[name](self, *args)
                if name == "_start_receive":
                    return Handle(lambda: _note_received(tracker, handle.wait()))
                result = handle.wait()
                if name not in ("_start_reduce", "_start_send"):  # real transports hold these until they are waited for
                    handle = Handle(lambda: (result, args)[0])
            kind = "pipeline buffers" if name == "_start_send" else ""
            if self._purpose[0] == "gather":  # pyright: ignore[reportPrivateUsage]
                kind = "gathered parameters"
                tracker.add(args[0], kind)
            tracker.add(result, kind)
            return handle

        return start

    for name in originals:
        setattr(ThreadCommunicator, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(ThreadCommunicator, name, original)


@contextmanager
def _noting_offloads() -> Generator[None]:
    """Inside, what stands for the host's memory does not count, and what comes back from it was saved."""
    make, fetch, room = offloading.host_buffer, OffloadedTensors.fetch, HostCopies.room

    def noted_room(self: HostCopies, x: Tensor) -> Tensor:
        buffer, tracker = room(self, x), _tracker()
        if tracker is not None:
            tracker.add(buffer, HOST)
        return buffer

    def noted_make(num_bytes: int, device: torch.device) -> Tensor:
        buffer, tracker = make(num_bytes, device), _tracker()
        if tracker is not None:
            tracker.add(buffer, HOST)
        return buffer

    def noted_fetch(self: OffloadedTensors) -> None:
        fetch(self)
        tracker = _tracker()
        for storage in self._storages:  # pyright: ignore[reportPrivateUsage]
            if tracker is not None and storage.device is not None:
                tracker.add(storage.device, "saved activations")

    offloading.host_buffer, OffloadedTensors.fetch, HostCopies.room = noted_make, noted_fetch, noted_room
    try:
        yield
    finally:
        offloading.host_buffer, OffloadedTensors.fetch, HostCopies.room = make, fetch, room


def _note_received(tracker: AllocationTracker, x: Tensor) -> Tensor:
    tracker.add(x)
    return x


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this subcommand."""
    parser.add_argument("--only", default="", help="cases whose title contains this")
    parser.add_argument("--held-out", action="store_true", help="the models that the walk was not made by")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(options: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    outcomes: list[Outcome] = []
    refused = 0
    for case in HELD_OUT_CASES if options.held_out else CASES:
        if options.only not in case.title:
            continue
        started = time.perf_counter()
        try:
            outcomes.append(measure(case))
        except AutoparError as error:
            refused += 1
            print(f"\n{case.title}: no plan: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        _print(outcomes[-1], time.perf_counter() - started)
    if refused:
        print(f"\n{refused} cases have no plan")
    if not outcomes:
        return 1
    errors = {kind: _mean([abs(o.ratio(kind) - 1) for o in outcomes if o.measured[kind]]) for kind in COMPARED}
    peaks = [o.predicted_peak / o.measured_peak - 1 for o in outcomes]
    print("\nmean absolute errors: " + ", ".join(f"{kind} {error:.2%}" for kind, error in errors.items()))
    print(f"peak: {_mean(list(map(abs, peaks))):.2%}, between {min(peaks):+.1%} and {max(peaks):+.1%}")
    if options.json:
        found = {"mean_absolute_error": errors | {"peak": _mean(list(map(abs, peaks)))}, "cases": len(outcomes)}
        print(json.dumps(found))
    return 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _print(outcome: Outcome, seconds: float) -> None:
    print(f"\n{outcome.case.title}  ({seconds:.1f} s)")
    for kind in (*KINDS, HOST):
        measured, predicted = outcome.measured[kind], outcome.predicted[kind]
        if measured or predicted:
            print(f"  {kind:20s} predicted {predicted / 1024:10.1f} K  measured {measured / 1024:10.1f} K  "
                  f"{outcome.ratio(kind):6.3f}")  # fmt: skip
    print(
        f"  {'peak':20s} predicted {outcome.predicted_peak / 1024:10.1f} K  measured "
        f"{outcome.measured_peak / 1024:10.1f} K  {outcome.predicted_peak / outcome.measured_peak:6.3f}",
        flush=True,
    )
