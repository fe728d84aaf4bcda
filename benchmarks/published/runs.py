"""Rows of a table of published training runs, read and checked."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Run", "UnpricedRowError", "num_parameters", "read_runs"]


class UnpricedRowError(Exception):
    """A row that can't be priced, and why."""


@dataclass(frozen=True)
class Run:
    """One row: a transformer, a cluster and a configuration."""

    id: str
    source: str
    url: str
    year: int
    gpu: str
    interconnect: str
    notes: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
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
    num_stages: int
    num_rounds: int
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
        return re.sub(r"^github\.com/([\w.-]+/[\w.-]+).*", r"\1", self.url) or self.source

    @property
    def num_microbatches(self) -> int:
        """Per step, on each data-parallel rank."""
        return max(1, round(self.global_batch / (self.data * self.micro_batch)))

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.num_heads

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part has a gate: a width that isn't 4 times the hidden one says so."""
        return self.ffn != 4 * self.hidden

    @property
    def routed(self) -> tuple[int, int]:
        """How many experts each token takes, of how many; (1, 1) for a dense model."""
        found = re.search(r"top-(\d+) of (\d+) experts", self.notes)
        return (int(found[1]), int(found[2])) if found else (1, 1)

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are gathered before each use."""
        return self.zero[:1] in ("2", "3") or self.zero.startswith("HSDP")

    @property
    def shard_size(self) -> int:
        """Over how many ranks of equal parameters the optimizer's states (or the parameters) are sharded."""
        if self.zero[:1] not in ("1", "2", "3", "H"):
            return 1
        found = re.search(r"HSDP (\d+)x|in groups of (\d+)", self.zero)
        return int(found[1] or found[2]) if found else self.data * self.context

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
    """Each row of the table: a `Run`, or (id, reason) if it doesn't say what is needed."""
    with Path(path).open(newline="") as file:
        return [_read(row) for row in csv.DictReader(file)]


def _read(row: dict[str, str]) -> Run | tuple[str, str]:
    name = row.get("id") or "?"
    try:
        run = _run(row)
    except (ValueError, KeyError, TypeError) as error:
        return name, f"a column is missing or holds no number: {error}"
    problem = _problem(run)
    return (name, problem) if problem else run


def _problem(run: Run) -> str:
    """Why a row contradicts itself, or what it leaves open; "" if nothing."""
    if run.data * run.tensor * run.context * run.num_stages != run.num_devices:
        return "dp * tp * cp * pp isn't the number of devices"
    if run.experts > 1 and run.routed[1] == 1:
        return "expert parallel, but the row doesn't say how many experts there are"
    layer, outer = num_parameters(run)
    tied, whole = ((run.num_layers * layer + share * outer) / 1e9 for share in (0.5, 1.0))
    if run.billions and run.routed[1] == 1 and not tied / 1.25 < run.billions < whole * 1.25:
        return "the shape has another number of parameters than the row says"
    if not run.tokens_per_s > 0:
        return "no throughput"
    return ""


def _run(row: dict[str, str]) -> Run:
    def whole(name: str, default: int = 0) -> int:
        text = row[name].strip()
        return int(text) if text or not default else default

    num_heads = whole("n_heads")
    return Run(
        id=row["id"], source=row["source"], url=row["url_or_repo_path"],
        year=int(row.get("year", "")[:4] or 0), gpu=row["gpu"],
        interconnect=row["interconnect"], notes=row["notes"], num_layers=whole("n_layers"), hidden=whole("hidden"),
        num_heads=num_heads, num_kv_heads=whole("n_kv_heads", num_heads), ffn=whole("ffn_hidden"),
        vocabulary=whole("vocab"), billions=float(row["params_b"] or 0), num_devices=whole("n_gpus"),
        devices_per_node=whole("gpus_per_node", 8), precision=row["precision"], data=whole("dp"), zero=row["zero"],
        tensor=whole("tp", 1), is_sequence_parallel=row["sp"] == "y", context=whole("cp", 1),
        num_stages=whole("pp", 1), num_rounds=whole("vpp", 1), experts=whole("ep", 1),
        micro_batch=whole("micro_batch"), global_batch=whole("global_batch"), length=whole("seq_len"),
        recompute=row["recompute"].lower(), compile=row["compile"], attention=row["attention"].lower(),
        tokens_per_s=float(row["tokens_per_s_per_gpu"]),
    )  # fmt: skip
