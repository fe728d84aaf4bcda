"""Published training runs as rows of a table, and what a step of each should take by autopar's own prices.

A row says which transformer ran on what, with which parallelism; `predict` lists the ops of one layer, prices each with
`ClusterPrices`, and puts them on a timeline: data, tensor, context and pipeline parallelism, sharded parameters,
recomputation, the optimizer.  No row has a number of its own: constants belong to devices and links
(`autopar/cluster.py`), to kernels (`autopar/cost`) or to a training stack (`STACKS`).
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from autopar.cluster import Cluster, Link
from autopar.cost import ClusterPrices
from autopar.cost.overlap import both_s, exposed_s, gathered_ahead_s, pipeline_s
from autopar.placement import Axis
from autopar.program import Op, Ref, TensorType

__all__ = ["Run", "UnpricedRowError", "predict_s", "read_runs"]


class UnpricedRowError(Exception):
    """A row that can't be priced, and why."""


# --- the rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One row: a transformer, a cluster and a configuration."""

    id: str
    source: str
    url: str
    gpu: str
    interconnect: str
    notes: str
    year: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    billions: float
    num_devices: int
    devices_per_node: int
    precision: str
    data: int
    zero: str
    tensor: int
    is_sequence_parallel: bool
    context: int
    stages: int
    rounds: int
    experts: int
    micro_batch: int
    global_batch: int
    length: int
    recompute: str
    compile: str
    attention: str
    tokens_per_s: float

    @property
    def family(self) -> str:
        """The publication that the row is from, without its section."""
        return re.sub(r"^github\.com/([\w.-]+/[\w.-]+).*", r"\1", self.url)

    @property
    def num_microbatches(self) -> int:
        """Per step, on each data-parallel rank."""
        return max(1, round(self.global_batch / (self.data * self.micro_batch)))

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part has a gate: a width that isn't 4 times the hidden one says so."""
        return self.ffn != 4 * self.hidden

    @property
    def num_routed(self) -> tuple[int, int]:
        """How many experts each token takes, of how many; (1, 1) for a dense model."""
        found = re.search(r"top-(\d+) of (\d+) experts", self.notes)
        return (int(found[1]), int(found[2])) if found else (1, 1)

    @property
    def measured_s(self) -> float:
        """Seconds of a step, from the tokens per second that the row reports."""
        return self.global_batch * self.length / (self.tokens_per_s * self.num_devices)


def read_runs(path: str | Path) -> list[Run | tuple[str, str]]:
    """Each row of the table: a `Run`, or (id, reason) where a column that is needed is missing."""
    with Path(path).open(newline="") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _read(row: dict[str, str]) -> Run | tuple[str, str]:
    try:
        return _run(row)
    except (ValueError, KeyError) as error:
        return row.get("id", "?"), f"a column is missing or no number: {error}"


def _run(row: dict[str, str]) -> Run:
    heads, length = int(row["n_heads"]), int(row["seq_len"])
    micro, whole, data = int(row["micro_batch"]), int(row["global_batch"]), int(row["dp"])
    return Run(
        row["id"], row["source"], row["url_or_repo_path"], row["gpu"], row["interconnect"], row["notes"], int(row["year"] or 0),
        int(row["n_layers"]), int(row["hidden"]), heads, int(row["n_kv_heads"] or heads), int(row["ffn_hidden"]),
        int(row["vocab"]), float(row["params_b"] or 0), int(row["n_gpus"]), int(row["gpus_per_node"] or 8),
        row["precision"], data, row["zero"], int(row["tp"] or 1), row["sp"] == "y", int(row["cp"] or 1),
        int(row["pp"] or 1), int(row["vpp"] or 1), int(row["ep"] or 1), micro, whole, length, row["recompute"],
        row["compile"], row["attention"], float(row["tokens_per_s_per_gpu"]),
    )  # fmt: skip


# --- training stacks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """What a training stack does, the same for all of its rows.

    Args:
        name: for messages.
        pattern: what its rows' sources match.
        fuses: chains of elementwise ops are one kernel each (a compiler, or fused layers written by hand).
        new_attention: attention by kernels of the device's own generation.
        overlaps_data: gradients are reduced, and sharded parameters gathered, beside compute.
        hidden_tensor: part of tensor-parallel communication that runs beside the products it belongs to.
        gradient_bytes: per element of a gradient, when it is reduced.
        state_bytes: per parameter, what the optimizer reads and writes.
        stops_early: a recomputed layer stops before its last product, whose result nobody reads.
    """

    name: str
    pattern: str
    fuses: bool
    new_attention: bool
    overlaps_data: bool
    hidden_tensor: float = 0.0
    gradient_bytes: int = 4
    state_bytes: float = 30.0
    stops_early: bool = False
    old_attention: bool = False
    scatters_sends: bool = False
    gathers_apart: int = 1
    casts_weights: bool = False


STACKS = (
    Stack("torch.compile", "torchtitan|torchao|torchtune|fms-fsdp", True, False, True, stops_early=True, casts_weights=True),
    Stack(
        "composer",
        "MosaicML|llm-foundry|Composer",
        False,
        False,
        True,
        state_bytes=92.0,
        stops_early=True,
        old_attention=True,
    ),
    Stack("paxml", "Paxml", True, True, False, gradient_bytes=2, stops_early=True),
    Stack("xla", "MaxText|XLA", True, True, True, gradient_bytes=2, stops_early=True),
    Stack("nemo", "NeMo|Megatron-Bridge|DGX Cloud", True, True, True, hidden_tensor=0.5, gradient_bytes=2),
    Stack("internevo", "InternEvo|InternLM", False, False, True, gradient_bytes=2),
    Stack("deepspeed", "ZeRO-3", True, False, False, gradient_bytes=2, state_bytes=60.0, gathers_apart=12),
    Stack("bigscience", "BigScience", True, False, False, gradient_bytes=2, state_bytes=60.0),
    Stack("megatron", "Megatron", True, False, False, gradient_bytes=2, state_bytes=60.0, scatters_sends=True),
)
_OTHER = Stack("other", "", True, False, True)


def stack_of(run: Run) -> Stack:
    """The stack that produced a row; for torch ones whether it compiles is told by the row."""
    found = next((stack for stack in STACKS if re.search(stack.pattern, run.source)), _OTHER)
    if found.name in ("torch.compile", "other"):
        found = replace(found, fuses=run.compile.startswith("y"))
    return found


# --- clusters -------------------------------------------------------------------------------------------------------

_OMNI_PATH = 0.25
"""Calibrated: what many rings at once get of Omni-Path's rate, relative to InfiniBand (BigScience's rows, pp 2 to 48)."""

_POWER_LIMITED = 0.5
"""Calibrated: what a device whose source calls it "power limited" keeps of its rates (torchao's B200 rows)."""

_GPUS = ("gb300", "gb200", "b200", "h200", "h100", "mi300x", "a100")


@lru_cache(maxsize=64)
def cluster_of(gpu: str, interconnect: str, devices_per_node: int, num_devices: int) -> Cluster:
    """The preset of a row's device, with the network that the row names."""
    text = gpu.lower()
    name = next((known for known in _GPUS if known in text), None)
    if name is None:
        raise UnpricedRowError(f"no preset for {gpu!r}")
    if name == "a100" and "40gb" in text:
        name = "a100-40gb"
    if name == "h100" and "500w" in text:
        name = "h100-500w"
    per_node = 64 if "nvl72" in text else devices_per_node
    cluster = Cluster.of(name, max(1, math.ceil(num_devices / per_node)), per_node)
    if "power limited" in text:
        device = cluster.device
        cluster = replace(cluster, device=replace(device, sustained_fraction=_POWER_LIMITED * device.sustained_fraction))
    gigabits = _gigabits_per_device(interconnect, devices_per_node)
    ring = _OMNI_PATH if "Omni-Path" in interconnect else 1.0
    return replace(cluster, between=_scaled(cluster.between, gigabits, ring)) if gigabits else cluster


def _gigabits_per_device(text: str, per_node: int) -> float:
    """What a row's interconnect column says about the network, per device; 0 if nothing."""
    if found := re.search(r"(\d+)\s*x\s*(\d+) Gb/s[^;]* per node", text):
        return int(found[1]) * int(found[2]) / per_node
    if found := re.search(r"(\d+) Omni-Path links \((\d+) Gb/s class\) per node", text):
        return int(found[1]) * int(found[2]) / per_node
    if found := re.search(r"(\d+) Gbps/node", text):
        return int(found[1]) / per_node
    if found := re.search(r"(\d+) Gb/s [\w\s-]*per GPU", text):
        return float(found[1])
    return 0.0


def _scaled(link: Link, gigabits: float, ring: float) -> Link:
    """`link` at another nominal rate: the same part of it is reached, by collectives only `ring` of that."""
    nominal = 50e9 if link.all_reduce_bytes_per_s > 30e9 else 25e9
    scale = gigabits / 8 * 1e9 / nominal
    return replace(
        link,
        all_reduce_bytes_per_s=link.all_reduce_bytes_per_s * scale * ring,
        gather_bytes_per_s=link.gather_bytes_per_s * scale * ring,
        exchange_bytes_per_s=link.exchange_bytes_per_s * scale,
    )


# --- the ops of a layer ---------------------------------------------------------------------------------------------


def _op(target: str, num_operands: int, saves: tuple[int, ...] = (), **kwargs: bool) -> Op:
    refs = tuple(Ref(f"x{index}") for index in range(num_operands))
    return Op("op", target, refs, tuple(kwargs.items()), ("y",), saves=saves)


_LINEAR = _op("aten.linear.default", 2, (0, 1))
_BMM = _op("aten.bmm.default", 2, (0, 1))
_FLASH = _op("aten.scaled_dot_product_attention.default", 3, (0, 1, 2, 3), is_causal=True)
_CUDNN = _op("aten._scaled_dot_product_cudnn_attention.default", 3, (0, 1, 2, 3), is_causal=True)
_NORM = _op("aten.layer_norm.default", 1, (0,))
_ADD = _op("aten.add.Tensor", 2)
_SAVING = _op("aten.gelu.default", 1, (0,))
_PAIR = _op("aten.mul.Tensor", 2, (0, 1))
_SOFTMAX = _op("aten._softmax.default", 1, (1,))
_DROPOUT = _op("aten.native_dropout.default", 1)
_EMBEDDING = _op("aten.embedding.default", 2)
_LOSS = _op("aten.cross_entropy_loss.default", 2)
_CAST = _op("aten._to_copy.default", 1)


@dataclass(frozen=True)
class Piece:
    """One op of a layer, priced: `tag` says which recomputation policies keep its result."""

    tag: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one microbatch in one layer on one device."""

    forward_s: float
    backward_s: float
    again_s: float


def _type(dtype: str, *shape: int) -> TensorType:
    return TensorType(tuple(max(1, extent) for extent in shape), dtype)


class Pricer:
    """Prices the ops of one row's layers."""

    def __init__(self, run: Run, stack: Stack, prices: ClusterPrices) -> None:
        self.run, self.stack, self.prices = run, stack, prices
        precision = run.precision.lower()
        self.dtype = "float16" if "fp16" in precision else "bfloat16"
        self.is_fp8 = "fp8" in precision or "float8" in precision
        self.product_dtype = "float8_e4m3fn" if self.is_fp8 else self.dtype
        self.tokens = run.micro_batch * run.length // run.context
        self.local_tokens = self.tokens // run.tensor if run.is_sequence_parallel else self.tokens

    def priced(self, tag: str, op: Op, operands: tuple[TensorType, ...], result: TensorType) -> Piece:
        """One op."""
        taken = self.prices.op_s(op, operands, (result,), True)
        return Piece(tag, taken.forward_s, taken.backward_s)

    def linear(self, tag: str, rows: int, inner: int, columns: int, *, plain: bool = False) -> list[Piece]:
        """A product with a weight; in 8 bits also what quantising takes."""
        dtype = self.dtype if plain else self.product_dtype
        operands = (_type(dtype, rows, inner), _type(dtype, columns, inner))
        pieces = [self.priced(tag, _LINEAR, operands, _type(self.dtype, rows, columns))]
        if not plain and "rowwise" in self.run.precision:
            pieces = [Piece(tag, pieces[0].forward_s / _ROWWISE, pieces[0].backward_s / _ROWWISE)]
        if dtype != self.dtype:
            quantised = [self.quantised_s(rows, inner), self.quantised_s(rows, columns)]
            if self.stack.casts_weights and "fp8 all-gather" not in self.run.precision:
                quantised[0] += self.quantised_s(columns, inner)
            pieces.append(Piece("bytes", quantised[0], quantised[1]))
        return pieces

    def quantised_s(self, rows: int, width: int) -> float:
        """Seconds of quantising a matrix along both dims.

        Delayed scaling reads it once; scaling by its current maximum reads it once more before; scales for blocks or
        rows are found along each dim for itself.
        """
        x, wide = _type(self.dtype, rows, width), _type(self.dtype, 2, rows, width)
        written = _type("float8_e4m3fn", 2, rows, width)
        precision = self.run.precision.lower()
        blocks, current = re.search("mx|fine|rowwise|fp4", precision), re.search("tensor|cs|float8", precision)
        cast_s = self.prices.op_s(_CAST, (wide if blocks or current else x,), (written,), False).forward_s
        return cast_s + (self.prices.op_s(_CAST, (x,), (x,), False).forward_s if blocks else 0.0)

    def elementwise(self, op: Op, rows: int, width: int, num_operands: int = 1) -> list[Piece]:
        """One kernel over rows of activations."""
        x = _type(self.dtype, rows, width)
        return [self.priced("bytes", op, (x,) * num_operands, x)]

    def in_single(self, op: Op, rows: int, width: int, num_kernels: int) -> list[Piece]:
        """A chain of kernels that computes in float32; one kernel on the activations' dtype if the stack fuses."""
        if self.stack.fuses:
            return self.elementwise(op, rows, width)
        x = _type("float32", rows, width)
        return [self.priced("bytes", op, (x,), x)] * num_kernels

    def norm(self) -> list[Piece]:
        """A norm's kernel; written in the model's own code (root mean square norms) it is 4 in float32."""
        return self.in_single(_NORM, self.local_tokens, self.run.hidden, 4 if self.run.is_gated else 0) or (
            self.elementwise(_NORM, self.local_tokens, self.run.hidden)
        )

    def attention(self) -> list[Piece]:
        """Attention over this device's heads."""
        run = self.run
        heads, size = run.heads // run.tensor, run.hidden // run.heads
        if "unfused" in run.attention:
            return self._unfused_attention(heads, size)
        op = _CUDNN if self.stack.new_attention or "cudnn" in run.attention.lower() else _FLASH
        query = _type(self.dtype, run.micro_batch, heads, run.length, size)
        piece = self.priced("attention", op, (query,) * 3, query)
        share = (2.0 if self.stack.old_attention else 1.0) / run.context
        return [Piece("attention", piece.forward_s * share, piece.backward_s * share)]

    def _unfused_attention(self, heads: int, size: int) -> list[Piece]:
        run = self.run
        batch = run.micro_batch * heads
        query, square = _type(self.dtype, batch, run.length, size), _type(self.dtype, batch, run.length, run.length)
        keys = _type(self.dtype, batch, size, run.length)
        return [
            self.priced("attention", _BMM, (query, keys), square),
            self.priced("attention", _SOFTMAX, (square,), square),
            self.priced("attention", _DROPOUT, (square,), square),
            self.priced("attention", _BMM, (square, query), query),
        ]

    def layer(self) -> list[Piece]:
        """All ops of one layer."""
        run, split = self.run, self.run.tensor
        size = run.hidden // run.heads
        queries, keys = run.heads * size // split, max(1, run.kv_heads // split) * size
        pieces = self.norm()
        pieces += self.linear("qkv", self.tokens, run.hidden, queries + 2 * keys)
        if run.is_gated:
            pieces += self.in_single(_SAVING, self.tokens, queries + keys, 3)
        pieces += self.attention()
        pieces += self.linear("out", self.tokens, queries, run.hidden)
        pieces += self.elementwise(_ADD, self.local_tokens, run.hidden, 2)
        pieces += self.norm()
        pieces += self.feed_forward()
        pieces += self.elementwise(_ADD, self.local_tokens, run.hidden, 2)
        return pieces

    def feed_forward(self) -> list[Piece]:
        """The feed-forward part; with experts, each token's share of them (padded to their capacity)."""
        run = self.run
        tokens, width = self.tokens * run.num_routed[0], run.ffn // run.tensor
        moved = self.elementwise(_SAVING, tokens, run.hidden) * 2 if run.num_routed[1] > 1 else []
        pieces = moved + self.linear("up", tokens, run.hidden, width * (2 if run.is_gated else 1))
        if run.is_gated:
            pieces += self.elementwise(_PAIR, tokens, width, 2) * (1 if self.stack.fuses else 2)
        else:
            pieces += self.elementwise(_SAVING, tokens, width)
        pieces += self.linear("down", tokens, width, run.hidden)
        return pieces

    def head_s(self) -> float:
        """Embedding, final norm, logits and loss, forward and backward."""
        run = self.run
        columns = run.vocabulary // run.tensor
        logits = _type(self.dtype, self.tokens, columns)
        single = _type("float32", self.tokens, columns)
        pieces = self.linear("head", self.tokens, run.hidden, columns, plain=True)
        pieces += self.elementwise(_NORM, self.local_tokens, run.hidden)
        if not self.stack.fuses:
            pieces.append(self.priced("bytes", _CAST, (logits,), single))
        pieces.append(self.priced("bytes", _LOSS, (single, _type("int64", self.tokens)), _type("float32", self.tokens)))
        return sum(piece.forward_s + piece.backward_s for piece in pieces)


_ROWWISE = 0.75
"""Calibrated: what 8-bit products with a scale for each row reach of the rate of those with one scale (3 rows)."""

# What each recomputation policy computes again, by tags; XLA's policies name what they save.
_POLICIES = {
    "save_qkv_proj": ("bytes", "attention", "out", "up"),
    "save_dot_except_mlpwi": ("bytes", "attention", "up"),
    "save_dot_except_mlp": ("bytes", "attention", "up"),
    "save_qkv_out_proj": ("bytes", "attention", "up"),
    "save_dot_with_context_except_mlp": ("bytes", "up"),
    "minimal_flash": ("bytes",),
}


def recomputed_s(run: Run, stack: Stack, pieces: list[Piece]) -> float:
    """Forward seconds that one layer's backward spends again."""
    policy = run.recompute.lower()
    whole = sum(p.forward_s for p in pieces if not (stack.stops_early and p.tag == "down"))
    if policy.startswith("full"):
        return whole
    if not policy.startswith("selective"):
        return 0.0
    named = next((tags for name, tags in _POLICIES.items() if re.search(rf"\b{name}\b", policy)), None)
    if named is not None:
        return sum(p.forward_s for p in pieces if p.tag in named)
    if stack.name in ("nemo", "megatron", "bigscience"):
        return sum(p.forward_s for p in pieces if p.tag == "attention")
    if found := re.search(r"1/(\d+)|every[ -](other|second|2nd)", policy + " " + run.notes):
        return whole / int(found[1] or 2)
    # Per-op selection keeps attention and every second product.
    share = {"bytes": 1.0, "attention": 0.0}
    return sum(p.forward_s * share.get(p.tag, 0.5) for p in pieces)


# --- the step -------------------------------------------------------------------------------------------------------


def num_parameters(run: Run) -> tuple[float, float]:
    """Of one layer (those of its experts that one rank holds), and of embedding and head together."""
    size = run.hidden // run.heads
    attention = run.hidden * size * (2 * run.heads + 2 * run.kv_heads)
    feed = run.hidden * run.ffn * (3 if run.is_gated else 2) * run.num_routed[1] / run.experts
    return attention + feed, 2 * run.vocabulary * run.hidden


_TAKEN = 0.25


def predict_s(run: Run) -> float:
    """Seconds of one training step of a row.

    Raises:
        UnpricedRowError: something about the row has no price.
    """
    stack = stack_of(run)
    cluster = cluster_of(run.gpu, run.interconnect, run.devices_per_node, run.num_devices)
    check_priced(run)
    return _Step(run, stack, ClusterPrices(cluster)).seconds()


def check_priced(run: Run) -> None:
    """Raise `UnpricedRowError` for what no term of the model describes."""
    if run.data * run.tensor * run.context * run.stages != run.num_devices:
        raise UnpricedRowError("dp * tp * cp * pp isn't the number of devices")
    if "fp4" in run.precision.lower():
        raise UnpricedRowError("no published product in 4 bits")
    layer, outer = num_parameters(run)
    totals = [(run.layers * layer + share * outer) / 1e9 for share in (0.5, 1.0)]
    if run.billions and not totals[0] / 1.25 < run.billions < totals[1] * 1.25:
        raise UnpricedRowError("the shape doesn't have as many parameters as the row says")


class _Step:
    def __init__(self, run: Run, stack: Stack, prices: ClusterPrices) -> None:
        self.run, self.stack, self.prices = run, stack, prices
        self.pricer = Pricer(run, stack, prices)
        self.pieces = self.pricer.layer()
        self.tensor = Axis(run.tensor, 1)
        self.context = Axis(run.context, run.tensor)
        self.data = Axis(run.data, run.tensor * run.context)
        self.is_sharded = run.zero[:1] in "23" or run.zero.startswith("HSDP")
        self.layers_here = run.layers / run.stages

    def collective_s(self, kind: str, axis: Axis, num_bytes: float) -> float:
        return self.prices.collective_s(kind, axis, num_bytes) if axis.size > 1 else 0.0

    def tensor_s(self) -> float:
        """Tensor-parallel collectives of one layer's forward; backward has as many."""
        run = self.run
        num_bytes = 2.0 * self.pricer.tokens * run.hidden
        if run.is_sequence_parallel:
            pair = [self.collective_s(kind, self.tensor, num_bytes) for kind in ("all_gather", "reduce_scatter")]
            whole = 2 * sum(pair)
        else:
            whole = 2 * self.collective_s("all_reduce", self.tensor, num_bytes)
        hidden = self.stack.hidden_tensor
        if "AsyncTP on" in run.notes:
            hidden = max(hidden, 0.5)
        return whole * (1 - hidden)

    def context_s(self) -> float:
        """Keys and values that go around a ring, where attention doesn't hide them; per forward."""
        run = self.run
        if run.context == 1:
            return 0.0
        keys = 2 * 2.0 * self.pricer.tokens * max(1, run.kv_heads // run.tensor) * (run.hidden // run.heads)
        ring_s = self.collective_s("all_gather", self.context, keys * run.context)
        attention_s = sum(p.forward_s for p in self.pieces if p.tag == "attention")
        return exposed_s(attention_s, ring_s, _TAKEN)

    def experts_s(self) -> float:
        """All-to-all of routed tokens, there and back, per forward."""
        run = self.run
        if run.num_routed[1] == 1 or run.experts == 1:
            return 0.0
        sent = 2.0 * self.pricer.local_tokens * run.hidden * run.num_routed[0]
        axis = Axis(run.experts, run.tensor * run.context)
        return 2 * self.collective_s("all_to_all", axis, sent)

    def layer_times(self) -> LayerTimes:
        """One layer, without data parallelism."""
        communication_s = self.tensor_s() + self.context_s() + self.experts_s()
        forward_s = sum(p.forward_s for p in self.pieces) + communication_s
        again_s = recomputed_s(self.run, self.stack, self.pieces)
        if self.run.recompute.startswith("full"):
            again_s += communication_s
        backward_s = sum(p.backward_s for p in self.pieces) + communication_s
        return LayerTimes(forward_s, backward_s, again_s)

    def seconds(self) -> float:
        """The whole step."""
        layer, head_s = self.layer_times(), self.pricer.head_s()
        if self.is_sharded and self.run.stages == 1:
            compute_s = self._sharded_s(layer, head_s)
        else:
            compute_s = self._stages_s(layer, head_s) + self._gradients_s(layer)
        return compute_s + self._optimizer_s() + self._accumulation_s()

    def _accumulation_s(self) -> float:
        """Adding each further microbatch's gradients to the sum: a read and a write of the sum, a read of the terms."""
        run = self.run
        parameters, outer = num_parameters(run)
        here = (self.layers_here * parameters + outer / run.stages) / run.tensor
        if self.is_sharded:
            here /= self._shard_axes()[0].size
        wide = 4 if "fp32 grad" in run.precision else self.stack.gradient_bytes
        # A product that adds to the sum itself reads and writes it, of which writing the terms is priced already.
        num_bytes = 2.0 * wide - 2 if self.stack.name == "nemo" else 2.0 * wide + 2
        return (run.num_microbatches - 1) * self.prices.optimizer_s(here, num_bytes)

    # Sharded parameters: gathered before each layer, forward and backward, gradients reduced after it.

    def _sharded_s(self, layer: LayerTimes, head_s: float) -> float:
        run = self.run
        parameters, outer = num_parameters(run)
        shard, replicas = self._shard_axes()
        width = 1 if self.pricer.is_fp8 and "fp8 all-gather" in run.precision else 2
        gather_s = self.collective_s("all_gather", shard, width * parameters / run.tensor)
        outer_gather_s = self.collective_s("all_gather", shard, 2 * outer / run.tensor)
        gradient = 2 if "PURE" in run.precision else self.stack.gradient_bytes
        reduce_s = self._reduce_s(shard, replicas, gradient * parameters / run.tensor)
        outer_reduce_s = self._reduce_s(shard, replicas, gradient * outer / run.tensor)
        apart = self.stack.gathers_apart
        if apart > 1:
            gather_s = apart * self.collective_s("all_gather", shard, width * parameters / run.tensor / apart)
            reduce_s = apart * self.collective_s("reduce_scatter", shard, gradient * parameters / run.tensor / apart)
        regathers = not run.zero.startswith("2")
        backward_gather_s = gather_s if regathers else 0.0
        if not self.stack.overlaps_data:
            communication_s = run.layers * (gather_s + backward_gather_s + reduce_s)
            compute_s = run.layers * (layer.forward_s + layer.backward_s + layer.again_s)
            return run.num_microbatches * (compute_s + communication_s + head_s + outer_gather_s + outer_reduce_s)
        forward = [(layer.forward_s, gather_s)] * run.layers
        # In backward each layer's compute runs beside the gather of the next and the reduction of the one before.
        backward = [(layer.backward_s + layer.again_s, backward_gather_s + reduce_s)] * run.layers
        once_s = (
            both_s(head_s, outer_gather_s + outer_reduce_s, _TAKEN)
            + gathered_ahead_s(forward, _TAKEN)
            + gathered_ahead_s(backward, _TAKEN)
        )
        return run.num_microbatches * once_s

    def _shard_axes(self) -> tuple[Axis, Axis]:
        run, stride = self.run, self.run.tensor * self.run.context
        found = re.search(r"HSDP (\d+)x(\d+)", run.zero)
        groups = re.search(r"in groups of (\d+)", run.zero)
        size = int(found[1]) if found else int(groups[1]) if groups else run.data
        return Axis(size, stride), Axis(run.data // size, stride * size)

    def _reduce_s(self, shard: Axis, replicas: Axis, num_bytes: float) -> float:
        scattered_s = self.collective_s("reduce_scatter", shard, num_bytes)
        return scattered_s + self.collective_s("all_reduce", replicas, num_bytes / shard.size)

    # Whole parameters: stages, then the gradients of a group's layers.

    def _stages_s(self, layer: LayerTimes, head_s: float) -> float:
        run = self.run
        counts = layers_of_stages(run.layers, run.stages, run.rounds)
        both = layer.forward_s + layer.backward_s + layer.again_s
        seconds = [count * both for count in counts]
        seconds[-1] += head_s
        if run.stages > 1:
            send_s = self._send_s()
            seconds = [second + send_s for second in seconds]
        return pipeline_s(seconds, run.num_microbatches, run.rounds)

    def _send_s(self) -> float:
        """Sends that a group waits for, per microbatch: forward and backward, each round."""
        run = self.run
        split = run.is_sequence_parallel or self.stack.scatters_sends
        num_bytes = 2.0 * self.pricer.tokens * run.hidden / (run.tensor if split else 1)
        axis = Axis(run.stages, run.num_devices // run.stages)
        once_s = self.collective_s("send", axis, num_bytes)
        return 0.0 if self.stack.overlaps_data else 2 * run.rounds * once_s

    def _gradients_s(self, layer: LayerTimes) -> float:
        """Reducing gradients and gathering parameters, where no compute hides it."""
        run = self.run
        parameters, outer = num_parameters(run)
        here = (self.layers_here * parameters + outer / (2 if run.stages > 1 else 1)) / run.tensor
        gradient = self.stack.gradient_bytes
        if self.stack.name == "internevo":
            # Gradients all-reduced; each rank broadcasts the parameters that it has updated.
            shard = self._shard_axes()[0]
            reduce_s = self.collective_s("all_reduce", self.data, gradient * here)
            gather_s = shard.size * self.collective_s("broadcast", shard, 2 * here / shard.size)
        elif run.zero.startswith("1"):
            reduce_s = self.collective_s("reduce_scatter", self.data, gradient * here)
            gather_s = self.collective_s("all_gather", self.data, 2 * here)
        else:
            reduce_s, gather_s = self.collective_s("all_reduce", self.data, gradient * here), 0.0
        if not self.stack.overlaps_data:
            return reduce_s + gather_s
        rounds = run.rounds if run.stages > 1 else 1
        forward_s = self.layers_here * layer.forward_s
        backward_s = self.layers_here * (layer.backward_s + layer.again_s)
        return exposed_s(backward_s, reduce_s, _TAKEN) + exposed_s(forward_s, gather_s, _TAKEN) + 0 * rounds

    def _optimizer_s(self) -> float:
        run = self.run
        parameters, outer = num_parameters(run)
        here = (self.layers_here * parameters + outer / run.stages) / run.tensor
        shards = self._shard_axes()[0].size if self.is_sharded or run.zero.startswith("1") else 1
        state = self.stack.state_bytes * (0.5 if "PURE" in run.precision else 1.0)
        return self.prices.optimizer_s(here / shards, state)


def layers_of_stages(layers: int, stages: int, rounds: int) -> list[int]:
    """Layers per device group: even where possible, else with embedding and head counted as a layer each."""
    pieces = stages * rounds
    if layers % pieces and (layers + 2) % pieces == 0:
        each = (layers + 2) // stages
        counts = [each] * stages
        counts[0] -= 1
        counts[-1] -= 1
        return counts
    return [layers // stages + (index < layers % stages) for index in range(stages)]
