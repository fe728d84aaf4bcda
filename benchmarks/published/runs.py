"""Rows of a table of published training runs, read and checked."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.cells import (
    Cells,
    expert_counts,
    has_nothing,
    is_yes,
    precision_of,
    recomputation_of,
    sharding_of,
)  # fmt: skip

__all__ = ["Run", "UnpricedRowError", "num_parameters", "read_runs"]


class UnpricedRowError(Exception):
    """A row that can't be priced, and why."""


@dataclass(frozen=True)
class Run:
    """One row: a transformer, a cluster and a configuration.  `assumed` says what the row leaves open."""

    id: str
    source: str
    url: str
    year: int
    model: str
    gpu: str
    interconnect: str
    notes: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    is_gated: bool
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
    num_stages: int
    num_rounds: int
    experts: int
    micro_batch: int
    global_batch: int
    length: int
    recompute: str
    is_compiled: bool
    attention: str
    tokens_per_s: float
    assumed: tuple[str, ...]

    @property
    def family(self) -> str:
        """The publication that the row is from, without its section."""
        return re.sub(r"^github\.com/([\w.-]+/[\w.-]+).*", r"\1", self.url) or self.source

    @property
    def dtype(self) -> str:
        """What products that aren't in 8 bits compute in."""
        return precision_of(self.precision) or "bfloat16"

    @property
    def is_in_eight_bits(self) -> bool:
        """Whether the products of layers are in 8 bits, or 4."""
        return re.search("fp8|float8|fp4|float4|e4m3", self.precision.lower()) is not None

    @property
    def is_asynchronous(self) -> bool:
        """Whether the row says that tensor-parallel communication is cut into pieces."""
        said = r"async[ -_]?(tp|tensor)[^;,]*\bon\b|tp[-_]comm[-_]overlap(?![^;,]*\b(off|false|no)\b)"
        return re.search(said, self.notes.lower()) is not None

    @property
    def num_microbatches(self) -> int:
        """Per step, on each data-parallel rank."""
        return max(1, round(self.global_batch / (self.data * self.micro_batch)))

    @property
    def routed(self) -> tuple[int, int]:
        """How many experts each token takes, of how many; (1, 1) for a dense model."""
        return expert_counts(f"{self.notes}; {self.model}")

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are gathered before each use."""
        return self.zero[:1] in ("2", "3") or self.zero.startswith("HSDP")

    @property
    def shard_size(self) -> int:
        """Over how many ranks of equal parameters the optimizer's states (or the parameters) are sharded."""
        if self.zero[:1] not in ("1", "2", "3", "H"):
            return 1
        if found := re.search(r"HSDP (\d+)x|in groups of (\d+)", self.zero, re.IGNORECASE):
            return int(found[1] or found[2])
        whole = self.data * self.context
        in_node = max(1, self.devices_per_node // self.tensor)
        return in_node if self.zero.startswith("HSDP") and whole % in_node == 0 else whole

    @property
    def measured_s(self) -> float:
        """Seconds of a step, from the tokens per second that the row reports."""
        return self.global_batch * self.length / (self.tokens_per_s * self.num_devices)


def num_parameters(run: Run) -> tuple[float, float]:
    """Of one layer (with those of its experts that one rank holds), and of embedding and head together."""
    attention = run.hidden * run.head_size * (2 * run.num_heads + 2 * run.num_kv_heads)
    feed_forward = run.hidden * run.ffn * (3 if run.is_gated else 2) * run.routed[1] / run.experts
    return attention + feed_forward, 2.0 * run.vocabulary * run.hidden


def read_runs(path: str | Path) -> list[Run | tuple[str, str]]:
    """Each row of the table: a `Run`, or (id, reason) if it doesn't say what is needed.

    Commas, semicolons or tabs may separate the cells.  Columns are known by name, in any order; further ones don't
    matter, and of those that are missing a row says nothing.
    """
    text = Path(path).read_bytes().decode("utf-8-sig", errors="replace").replace("\0", "")
    return [_read(index, row) for index, row in enumerate(_rows(text), start=1)]


def _rows(text: str) -> Iterator[dict[str, str]]:
    lines = text.splitlines(keepends=True)
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        return
    separator = max(",;\t", key=lines[0].count)
    table = csv.reader(lines, delimiter=separator)
    names = [re.sub(r"[\s-]+", "_", name.strip().lower()) for name in next(table)]
    for cells in table:
        if any(cell.strip() for cell in cells):
            yield dict(zip(names, cells, strict=False))


def _read(index: int, row: dict[str, str]) -> Run | tuple[str, str]:
    cells = Cells(row)
    name = cells.text("id") or f"row {index}"
    try:
        run = _gated_as_its_size_says(_run(name, cells))
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        return name, f"a column is missing or holds no number: {error}"
    problem = _problem(run)
    return (name, problem) if problem else run


def _problem(run: Run) -> str:
    """Why a row contradicts itself, or what it leaves open; "" if nothing."""
    positive = (run.num_layers, run.hidden, run.num_heads, run.ffn, run.vocabulary, run.length, run.global_batch)
    if min(positive) < 1 or run.head_size < 1 or run.routed[1] < run.routed[0] or run.routed[0] < 1:
        return "a size is zero"
    if run.num_layers > 10_000 or max(*positive, run.num_devices) > 1e9:
        return "a size is beyond every model's"
    if run.data * run.tensor * run.context * run.num_stages != run.num_devices:
        return "dp * tp * cp * pp isn't the number of devices"
    if run.experts > 1 and run.routed[1] == 1:
        return "expert parallel, but the row doesn't say how many experts there are"
    if run.num_stages > run.num_layers:
        return "more stages than layers"
    if not _is_as_large_as_it_says(run):
        return "the shape has another number of parameters than the row says"
    if not run.tokens_per_s > 0:
        return "no throughput"
    return ""


def _is_as_large_as_it_says(run: Run) -> bool:
    if not run.billions or run.routed[1] > 1:
        return True
    layer, outer = num_parameters(run)
    tied, whole = ((run.num_layers * layer + share * outer) / 1e9 for share in (0.5, 1.0))
    return tied / 1.25 < run.billions < whole * 1.25


def _gated_as_its_size_says(run: Run) -> Run:
    """Where only the other kind of feed-forward has the number of parameters that the row says, it is that kind."""
    other = replace(run, is_gated=not run.is_gated)
    return other if not _is_as_large_as_it_says(run) and _is_as_large_as_it_says(other) else run


def _run(name: str, cells: Cells) -> Run:
    text, whole, number = cells.text, cells.whole, cells.number
    hidden, length = whole("hidden"), whole("seq_len")
    heads = whole("n_heads", lambda: (hidden / 128, "heads of 128"))
    tensor, context, stages, devices = _degrees(cells)
    data = _num_data_ranks(cells, devices, tensor, context, stages)
    micro_batch, global_batch = _batches(cells, data, stages, length)
    ffn = whole("ffn_hidden", lambda: (4 * hidden, "a feed-forward width of 4 times hidden"))
    year = re.search(r"20\d\d", text("year"))
    layers = whole("n_layers")
    return Run(
        id=name, source=text("source"), url=text("url_or_repo_path"), year=int(year[0]) if year else 0,
        model=text("model"), gpu=_gpu(cells), interconnect=text("interconnect"), notes=text("notes"),
        num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=whole("n_kv_heads", heads),
        head_size=_head_size(cells, hidden, heads), ffn=ffn, is_gated=ffn != 4 * hidden,
        vocabulary=whole("vocab", lambda: (50304, "a vocabulary of 50304")), billions=number("params_b", 0.0),
        num_devices=devices, devices_per_node=whole("gpus_per_node", _usual_per_node(text("gpu"))),
        precision=_precision(cells), data=data, zero=_sharding(cells, tensor * stages), tensor=tensor,
        is_sequence_parallel=_is_sequence_parallel(cells, tensor, int(year[0]) if year else 0), context=context,
        num_stages=stages, num_rounds=max(1, min(whole("vpp", 1), layers // stages)) if stages > 1 else 1,
        experts=whole("ep", 1), micro_batch=micro_batch, global_batch=global_batch, length=length,
        recompute=_recomputation(cells), is_compiled=is_yes(text("compile")), attention=text("attention").lower(),
        tokens_per_s=_tokens_per_s(cells, global_batch * length, devices), assumed=tuple(cells.assumed),
    )  # fmt: skip


def _gpu(cells: Cells) -> str:
    """PyTorch's own tables are from one fleet: where they say more of its H100s, they have 500 W."""
    gpu = cells.text("gpu")
    is_own = re.search(r"torchtitan|torchao|pytorch/ao", f"{cells.text('source')} {cells.text('url_or_repo_path')}")
    if is_own and re.fullmatch(r"(nvidia[ -])?h100([ -]80 ?gb)?( \(.*not stated.*\))?", gpu.lower()):
        cells.assumed.append("H100s of 500 W, as torchtitan's benchmark documents say of theirs")
        return f"{gpu} HBM2e 500 W"
    return gpu


def _usual_per_node(gpu: str) -> int:
    return 4 if re.search(r"\bgb[23]00", gpu.lower()) else 8


def _degrees(cells: Cells) -> tuple[int, int, int, int]:
    """Tensor, context and pipeline parallel, and how many devices there are; one may follow from the others."""
    names = ("tp", "cp", "pp")
    said = {name: cells.whole(name, 1) for name in names}
    product = math.prod(said.values())
    if found := re.match(r"\s*(\d+)\s*[x*]\s*(\d+)\b", cells.text("n_gpus")):
        devices = int(found[1]) * int(found[2])
    else:
        devices = cells.whole("n_gpus", lambda: (cells.number("dp") * product, "as many devices as the degrees say"))
    left_open = [name for name in names if has_nothing(cells.text(name))]
    rest = devices / (product * cells.number("dp", devices / product))
    if len(left_open) == 1 and rest > 1 and rest.is_integer():
        said[left_open[0]] = int(rest)
        cells.assumed.append(f"{left_open[0]} is what the other degrees leave")
    return said["tp"], said["cp"], said["pp"], devices


def _num_data_ranks(cells: Cells, devices: int, tensor: int, context: int, stages: int) -> int:
    """Some sources count the ranks of one sequence among those of the data."""
    rest = devices / (tensor * context * stages)
    data = cells.whole("dp", lambda: (rest, "data parallel is what the other degrees leave"))
    return data // context if data == devices / (tensor * stages) else data


def _batches(cells: Cells, data: int, stages: int, length: int) -> tuple[int, int]:
    """Samples per microbatch and rank, and per step."""
    if has_nothing(cells.text("global_batch")):
        micro_batch = cells.whole("micro_batch")
        cells.assumed.append("no gradient accumulation")
        total = micro_batch * data
    else:
        total = cells.whole("global_batch")
        if "tok" in cells.text("global_batch").lower() or total > 200_000:
            cells.assumed.append("the global batch counts tokens")
            total = round(total / length)
        micro_batch = cells.whole("micro_batch", lambda: (1, "a micro batch of 1"))
    if total < data:
        raise ValueError(f"global_batch: {total} samples over {data} data-parallel ranks")
    if micro_batch * data > total:
        cells.assumed.append("one microbatch")
        micro_batch = total // data
    if stages > 1 and micro_batch * data == total and micro_batch % stages == 0:
        cells.assumed.append("micro_batch is a rank's whole batch, cut into as many microbatches as stages")
        micro_batch //= stages
    return max(1, micro_batch), total


def _head_size(cells: Cells, hidden: int, heads: int) -> int:
    found = re.search(r"head[ _-]?(?:dim|size)\D{0,4}(\d+)", cells.text("notes").lower())
    return int(found[1]) if found else hidden // max(1, heads)


def _precision(cells: Cells) -> str:
    precision = cells.text("precision")
    if not re.search(r"\d|half|amp|mixed|nv|mx", precision.lower()):
        cells.assumed.append("bf16")
        return "bf16"
    return precision


def _is_sequence_parallel(cells: Cells, tensor: int, year: int) -> bool:
    """Where a row doesn't say: since 2022 stacks with tensor parallelism have it on in their recipes."""
    if not has_nothing(cells.text("sp")):
        return is_yes(cells.text("sp")) or cells.text("sp").lower().startswith("seq")
    if tensor > 1 and year >= 2022:
        cells.assumed.append("sequence parallel")
        return True
    return False


def _sharding(cells: Cells, model_parallel: int) -> str:
    """Where a row doesn't say: with tensor or pipeline parallelism a distributed optimizer, else sharded parameters."""
    if has_nothing(cells.text("zero")) and cells.text("zero").lower() != "none" and cells.text("n_gpus") != "1":
        usual = "1" if model_parallel > 1 or re.search("NeMo|Megatron|DGX Cloud", cells.text("source")) else "3"
        cells.assumed.append(f"ZeRO-{usual}")
        return usual
    return sharding_of(cells.text("zero"))


def _recomputation(cells: Cells) -> str:
    policy = recomputation_of(cells.text("recompute"))
    if not policy:
        cells.assumed.append("no recomputation")
    return policy or "none"


def _tokens_per_s(cells: Cells, tokens: int, devices: int) -> float:
    if has_nothing(cells.text("tokens_per_s_per_gpu")) and not has_nothing(cells.text("step_time_s")):
        return tokens / cells.number("step_time_s") / devices
    return cells.number("tokens_per_s_per_gpu")
