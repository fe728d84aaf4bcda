"""A device and a link as numbers, each with where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import MeshError

__all__ = ["Device", "HostLink", "Link", "OpTime", "device_type_of"]

_LEAST, _MOST = 1e-12, 1e21
"""What is positive and finite is between these, so that a price, which divides by two such numbers, is finite too."""


def device_type_of(name: str) -> str:
    """What torch calls devices of this name: ``"cpu"`` or ``"cuda"``; no name is that of a process on a CPU."""
    return "cpu" if name in ("", "cpu") else "cuda"


@dataclass(frozen=True)
class Device:
    """One kind of accelerator (or a CPU process), and what programs really get out of it.

    Args:
        name: for the plan.
        memory_bytes: what a framework sees of the device's memory.
        memory_bytes_per_s: peak of the data sheet, reads and writes together.
        flops_per_s: dense peak by dtype, as torch multiplies by default (float32 without TF32).
        matmul_efficiency: part of that peak that the inner loop of a large matrix product reaches.
        attention_efficiency: the same for fused attention on long sequences with head dim 128.
        memory_efficiency: part of the peak that a copy reaches.
        launch_s: what one kernel costs in addition to its work.
        sustained_fraction: part of its rate in matrix products that the device keeps under minutes of load, when
            power and heat lower its clock.  Short benchmarks don't show it.
        new_attention_efficiency: as `attention_efficiency`, for kernels written for this generation of devices
            (FlashAttention-3, cuDNN's); 0 if there are none.
        reserved_memory_bytes: taken before the program starts: context, communicators, workspaces.
        usable_memory_fraction: part of the rest that a plan may fill; the remainder is for fragmentation.
        host_bytes_per_s: what a copy between the device and pinned host memory moves, one way, while the other devices
            of the node do so as well; 0: not known, and nothing can be offloaded.
        host_memory_bytes: the device's share of its node's memory.
        sources: where each number comes from, by field name.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    launch_s: float
    sustained_fraction: float = 1.0
    new_attention_efficiency: float = 0.0
    reserved_memory_bytes: float = 0.0
    usable_memory_fraction: float = 0.94
    host_bytes_per_s: float = 0.0
    host_memory_bytes: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    @property
    def type(self) -> str:
        """As torch calls it."""
        return device_type_of(self.name)

    def __post_init__(self) -> None:
        """Refuse numbers that make prices infinite or negative."""
        positive = ("memory_bytes", "memory_bytes_per_s")
        fractions = (
            "matmul_efficiency",
            "attention_efficiency",
            "memory_efficiency",
            "sustained_fraction",
            "usable_memory_fraction",
        )
        others = (
            "launch_s",
            "reserved_memory_bytes",
            "new_attention_efficiency",
            "host_bytes_per_s",
            "host_memory_bytes",
        )
        _check_numbers(self, positive=positive, fractions=fractions, others=others)
        wrong = {dtype: rate for dtype, rate in self.flops_per_s.items() if not _LEAST <= rate <= _MOST}
        if wrong:
            raise MeshError(f"device {self.name!r}: flops_per_s must be positive, got {wrong}")

    @property
    def overhead_bytes(self) -> float:
        """What communicators, the context and the allocator's fragments take: a plan may not use it."""
        return self.memory_bytes - self.usable_memory_bytes

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes that a plan may fill."""
        return max(0.0, self.memory_bytes - self.reserved_memory_bytes) * self.usable_memory_fraction


@dataclass(frozen=True)
class HostLink:
    """What joins a device to its host's memory.

    Args:
        bytes_per_s: of a copy, one way; 0: there are none.
        latency_s: of each copy.
        memory_bytes: of the host's memory, what the programs of one device may fill.
        taken: part of a device's speed that a copy takes from what computes at the same time: 0 to 1.
        update_bytes_per_s: what the host's cores read and write of its memory in an optimizer's step, a device's share;
            0: as much as the device does.
    """

    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    memory_bytes: float = 0.0
    taken: float = 0.0
    update_bytes_per_s: float = 0.0

    @property
    def overlaps(self) -> bool:
        """Whether a device computes while it copies."""
        return self.bytes_per_s > 0 and self.taken < 1

    def copy_s(self, num_bytes: float, num_tensors: int) -> float:
        """Seconds to copy tensors one way, infinite without a link."""
        if not num_bytes:
            return 0.0
        return num_tensors * self.latency_s + num_bytes / self.bytes_per_s if self.bytes_per_s else float("inf")

    def exposed_s(self, copying_s: float, computing_s: float) -> float:
        """What such a copy adds to so much computing beside it (`autopar.step.overlap_estimate`)."""
        return copying_s - min((1 - self.taken) * copying_s, computing_s) if copying_s else 0.0


@dataclass(frozen=True)
class Link:
    """What connects devices, as the collectives of a full group see it.

    A collective on n devices with a buffer of s bytes (the NCCL tests' "size") takes
    ``latency_s + step_s * steps(n) + traffic / bytes_per_s + ramp_s * s / (s + ramp_bytes)``, where ``traffic / time``
    is the NCCL tests' "bus bandwidth".  The last term is the filling of the transport's pipeline; it is why
    middle-sized messages stay far below the peak.

    Args:
        name: for messages.
        all_reduce_bytes_per_s: bus bandwidth of an all-reduce, with in-network reduction where the link has
            it.
        gather_bytes_per_s: bus bandwidth of all-gather, reduce-scatter and broadcast.
        exchange_bytes_per_s: bus bandwidth of all-to-all.  For a link between nodes all three are per
            *device*, with all
            devices of a node sending at once.
        latency_s: of any collective, however small.
        step_s: further latency of each step from device to device (from node to node on a link between nodes).
        ring_step_s: between nodes, what each device of the ring of an all-gather or reduce-scatter adds; 0: as
            `step_s` for each node.
        ramp_s: time lost while the pipeline fills, at most.
        ramp_bytes: buffer size at which half of it is lost.
        nodes_at_half_rate: a link between nodes: how many of them crowd the network so that half of its rate is left;
            m nodes get ``1 / (1 + m / nodes_at_half_rate)``.
        is_mesh: each pair of devices has a wire of its own, so that a group of n uses (n-1)/(all-1) of the
            bandwidth.
        sources: where each number comes from, by field name.
    """

    name: str
    all_reduce_bytes_per_s: float
    gather_bytes_per_s: float
    exchange_bytes_per_s: float
    latency_s: float
    step_s: float
    ramp_s: float = 0.0
    ramp_bytes: float = 8 * 2.0**20
    nodes_at_half_rate: float = 1e9
    ring_step_s: float = 0.0
    is_mesh: bool = False
    sources: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

    @property
    def type(self) -> str:
        """As torch calls it."""
        return device_type_of(self.name)

    def __post_init__(self) -> None:
        """Refuse numbers that make prices infinite or negative."""
        rates = (
            "all_reduce_bytes_per_s",
            "gather_bytes_per_s",
            "exchange_bytes_per_s",
            "ramp_bytes",
            "nodes_at_half_rate",
        )
        _check_numbers(self, positive=rates, fractions=(), others=("latency_s", "step_s", "ramp_s", "ring_step_s"))


@dataclass(frozen=True)
class OpTime:
    """Seconds that one op takes on local tensors, forward and backward, and where the numbers come from.

    `source` is one of ``"layers"`` (the op's layer was timed as a whole), ``"scaled"`` (others of its kind were),
    ``"measured"`` (ops like it were), ``"published"``, ``"calibrated"`` and ``"estimate"``.
    """

    forward_s: float
    backward_s: float
    source: str


def _check_numbers(
    thing: Device | Link, positive: tuple[str, ...], fractions: tuple[str, ...], others: tuple[str, ...]
) -> None:
    for name in positive + fractions + others:
        value: Any = getattr(thing, name)
        least, most = (0.0 if name in others else _LEAST), (1.0 if name in fractions else _MOST)
        if not least <= value <= most:
            wanted = "in (0, 1]" if name in fractions else "at least 0" if name in others else "positive"
            raise MeshError(f"{type(thing).__name__} {thing.name!r}: {name} must be {wanted} and finite, got {value}")
