"""A question to the planner: its inputs, and how texts such as ``nodes=16`` change them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster import Cluster
from autopar.errors import QuestionError
from autopar.planning.arguments import read_bytes
from autopar.planning.expectations import Expectations, read_expectations
from autopar.planning.length_plans import read_distribution
from autopar.search.settings.constraints import CONSTRAINT_WORDS

__all__ = ["Question", "change", "check_varied", "parse_cluster"]

_RATE_UNITS = {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Gb/s": 1e9 / 8}
_NODES = r"(?:([0-9]{1,9})x)?([0-9]{1,9})x([A-Za-z][\w-]*)"
_NAMES = ("memory", "batch", "seq", "nodes", "device", "optimizer", "compile", "imbalance", "documents", "lengths")
_LINKS = {"inter": "between", "between": "between", "intra": "within", "within": "within"}


@dataclass(frozen=True)
class Question:
    """The planner's inputs that can be varied.

    Args:
        cluster: the devices and links.
        memory: bytes per device, or text; None: what a device has.
        batch: rows of the global batch; None: what the target has.
        sequence: tokens per row; None: what the target has.
        constraints: as `autopar.plan` takes them.
        optimizer: as `autopar.plan` takes it.
        precision: as `autopar.plan` takes it.
        compile: as `autopar.plan` takes it.
        imbalance: as `autopar.plan` takes it, as text.
        documents: as `autopar.plan` takes it, as text.
        lengths: a file of lengths of sequences (`autopar.balance.Lengths.read`); longer ones than a row are cut.
    """

    cluster: Cluster
    memory: float | str | None = None
    batch: int | None = None
    sequence: int | None = None
    constraints: tuple[str, ...] = ()
    optimizer: str = "adamw"
    precision: str | None = None
    compile: bool | None = None
    imbalance: str | None = None
    documents: str | None = None
    lengths: str | None = None

    @property
    def shapes(self) -> tuple[int | None, int | None, bool | None]:
        """What the model has to be traced for: rows, tokens, and whether rows pack documents (None: if it can)."""
        can_pack = None if self.lengths is not None else False
        return self.batch, self.sequence, True if self.documents is not None else can_pack

    def is_replan_of(self, other: Question) -> bool:
        """Whether it is about the same layers at the same prices: then a search for its plan uses the candidates of
        layers that a search for the other's has made.
        """
        return replace(self, constraints=other.constraints, memory=other.memory) == other

    @property
    def expected(self) -> Expectations:
        """What is expected of the data; documents have the lengths of sequences, unless others are named."""
        given = read_distribution(self.lengths) if self.documents is None else self.documents
        return read_expectations(self.imbalance, given)


def parse_cluster(text: str) -> Cluster:
    """``"8x8xh100"``: nodes x devices per node x device; ``"8xh100"`` is one node; or a file that `Cluster.save` wrote.

    Raises:
        QuestionError: it is neither.
        MeshError: there is no such device.
    """
    if text.endswith(".json"):
        if not Path(text).is_file():
            raise QuestionError(
                f"there is no cluster file {text!r}: write nodes x devices per node x device instead, such as "
                "8x8xh100, or a file with Cluster.save"
            )
        return Cluster.load(text)
    text = text.strip()  # as from a file that was read in
    match = re.fullmatch(_NODES, text)
    if match is None and all(re.fullmatch(_NODES, part.strip()) for part in re.split(r"[+,;&]", text)):
        raise QuestionError(
            f"--cluster {text!r}: clusters of unlike nodes can't be planned for yet. Plan for one kind of node "
            "(--cluster 8x8xh100), or for all of them as the slowest kind, with the memory of the smallest (--memory)"
        )
    if match is None or not int(match[2]) or (match[1] is not None and not int(match[1])):
        raise QuestionError(
            f"--cluster {text!r}: write nodes x devices per node x device, such as 8x8xh100 (one node: 4xa100-80); "
            f"devices: {', '.join(Cluster.names())}; or the path of a file that Cluster.save wrote"
        )
    return Cluster.of(match[3], nodes=int(match[1] or 1), devices_per_node=int(match[2]))


def change(question: Question, text: str) -> Question:
    """`question` with one thing changed.

    Args:
        question: the question so far.
        text: ``memory=40GiB``, ``nodes=16``, ``batch=128``, ``seq=4096``, ``device=h200``, ``link.inter=100GB/s``,
            ``link.intra=300GB/s``, ``precision=bf16``, ``optimizer=sgd``, ``compile=no``, ``imbalance=1.5``,
            ``documents=4096``, ``lengths=FILE``, or a constraint such as ``tensor=2``.

    Raises:
        QuestionError: it is none of these.
        ConstraintError: it is not an amount of memory, no imbalance, or no length of documents.
    """
    name, separator, value = text.partition("=")
    name = name.strip()
    value = value.strip()
    if not separator or not value:
        raise QuestionError(
            f"{text!r}: write name=value, such as memory=40GiB, nodes=16, batch=128 or link.inter=100GB/s"
        )
    if name == "memory":
        read_bytes(value)
        return replace(question, memory=value)
    if name in ("batch", "seq"):
        number = _whole(text, value)
        return replace(question, batch=number) if name == "batch" else replace(question, sequence=number)
    if name in ("nodes", "device"):
        return replace(question, cluster=_other_cluster(question.cluster, text, name, value))
    if name.startswith("link."):
        return replace(question, cluster=_other_link(question.cluster, text, name.removeprefix("link."), value))
    if name in ("precision", "optimizer"):
        return replace(question, **{name: value})
    if name in ("imbalance", "documents", "lengths"):
        changed = replace(question, **{name: value})
        _ = changed.expected  # which says what is wrong with it
        return changed
    if name == "compile":
        return replace(question, compile=_yes_or_no(text, value))
    if near := difflib.get_close_matches(name, _NAMES, 1, 0.75):
        raise QuestionError(f"{text!r}: did you mean {near[0]}={value}?")
    check_varied(name, repr(text))
    return replace(question, constraints=(*question.constraints, text))


def check_varied(name: str, text: str) -> None:
    """Raise QuestionError, about `text`, unless there is something called `name` that can vary."""
    key = name.rpartition(":")[2].strip().lower()
    if not name.startswith("link.") and key not in (*_NAMES, "precision", *CONSTRAINT_WORDS):
        raise QuestionError(
            f"{text}: {key!r} is nothing that can vary: there are {', '.join(_NAMES)}, precision, link.inter, "
            "link.intra, and constraints such as tensor, zero or recompute"
        )


def _yes_or_no(text: str, value: str) -> bool:
    if value not in ("yes", "no"):
        raise QuestionError(f"{text!r}: write compile=yes or compile=no")
    return value == "yes"


def _whole(text: str, value: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", value) or not int(value):
        name = text.partition("=")[0]
        raise QuestionError(f"{text!r}: {value!r} is not a positive whole number; write for instance {name}=16")
    return int(value)


def _other_cluster(cluster: Cluster, text: str, name: str, value: str) -> Cluster:
    if name == "nodes":
        return replace(cluster, num_nodes=_whole(text, value))
    return Cluster.of(value, nodes=cluster.num_nodes, devices_per_node=cluster.devices_per_node)


def _other_link(cluster: Cluster, text: str, which: str, value: str) -> Cluster:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?[Bb]/s)", value)
    if which not in _LINKS or match is None or match[2] not in _RATE_UNITS:
        raise QuestionError(
            f"{text!r}: write link.inter=100GB/s (per device, between nodes) or link.intra=300GB/s (inside a node); "
            f"units: {', '.join(_RATE_UNITS)}"
        )
    rate = float(match[1]) * _RATE_UNITS[match[2]]
    link = getattr(cluster, _LINKS[which])
    # The rates of the three kinds of collectives keep their proportions.
    factor = rate / link.gather_bytes_per_s
    changed = replace(
        link,
        name=f"{link.name} at {value}",
        all_reduce_bytes_per_s=link.all_reduce_bytes_per_s * factor,
        gather_bytes_per_s=rate,
        exchange_bytes_per_s=link.exchange_bytes_per_s * factor,
    )
    return replace(cluster, **{_LINKS[which]: changed})
