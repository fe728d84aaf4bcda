"""A device and a link as numbers, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import MeshError

__all__ = ["Device", "HostLink", "Link", "OpTime", "device_type_of"]

_LEAST, _MOST = 1e-12, 1e21
"""Bounds of positive numbers, so that a price, which divides by two of them, is finite."""


_PLUG_INS = {"ascend": "npu", "gaudi": "hpu", "trainium": "neuron"}
"""What the vendors' plug-ins for torch call their devices."""


def device_type_of(name: str) -> str:
    """Torch's device type of devices with this name: ``"cuda"``, ``"npu"``, ...; ``"cpu"`` for an empty name."""
    if name in ("", "cpu"):
        return "cpu"
    return next((kind for part, kind in _PLUG_INS.items() if name.lower().startswith(part)), "cuda")


@dataclass(frozen=True)
class Device:
    """One kind of accelerator (or a CPU process), and which part of its peak rates programs reach.

    Args:
        name: shown in plans.
        memory_bytes: the device's memory as the framework sees it.
        memory_bytes_per_s: peak of the data sheet, reads and writes together.
        flops_per_s: dense peak by dtype, for products as torch computes them by default (float32 without TF32).
        matmul_efficiency: the fraction of that peak that the inner loop of a large matrix product reaches.
        attention_efficiency: the same for fused attention on long sequences with head dim 128.
        memory_efficiency: the fraction of the memory's peak that a copy reaches.
        launch_s: the overhead of one kernel.
        sustained_fraction: the fraction of its rate in matrix products that the device keeps under minutes of load,
            when power and heat lower its clock.  Short benchmarks don't show it.
        new_attention_efficiency: as `attention_efficiency`, for kernels written for this generation of devices
            (FlashAttention-3, cuDNN's); 0 if there are none.
        reserved_memory_bytes: memory in use before the program starts: context, communicators, workspaces.
        usable_memory_fraction: the fraction of the other memory that a plan may fill; the rest allows for
            fragmentation.
        host_bytes_per_s: the rate of a copy between the device and pinned host memory, one way, while the other devices
            of the node copy as well; 0: unknown, and nothing can be offloaded.
        host_memory_bytes: the device's share of its node's memory.
        sources: field name -> the source of the number.
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
        """The device type in torch: ``"cpu"`` or ``"cuda"``."""
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
        invalid = {dtype: rate for dtype, rate in self.flops_per_s.items() if not _LEAST <= rate <= _MOST}
        if invalid:
            raise MeshError(f"device {self.name!r}: flops_per_s must be positive, got {invalid}")

    @property
    def overhead_bytes(self) -> float:
        """Bytes that a plan may not use: the context, communicators, and the allocator's fragmentation."""
        return self.memory_bytes - self.usable_memory_bytes

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes that a plan may fill."""
        return max(0.0, self.memory_bytes - self.reserved_memory_bytes) * self.usable_memory_fraction


@dataclass(frozen=True)
class HostLink:
    """The link between a device and its host's memory.

    Args:
        bytes_per_s: the rate of a copy, one way; 0: there is no link.
        latency_s: of each copy.
        memory_bytes: how much of the host's memory the programs of one device may fill.
        taken: by which fraction, 0 to 1, a copy slows down compute that runs at the same time.
        update_bytes_per_s: the rate at which the host's cores read and write its memory in an optimizer's step, one
            device's share of it; 0: the same as the device's.
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
        """Seconds to copy `num_tensors` tensors of `num_bytes` in total one way; infinite without a link."""
        if not num_bytes:
            return 0.0
        return num_tensors * self.latency_s + num_bytes / self.bytes_per_s if self.bytes_per_s else float("inf")

    def exposed_s(self, copying_s: float, computing_s: float) -> float:
        """Exposed seconds of a copy that overlaps with compute (`autopar.step.costs.overlap_estimate`)."""
        return copying_s - min((1 - self.taken) * copying_s, computing_s) if copying_s else 0.0


@dataclass(frozen=True)
class Link:
    """A link between devices, described by the rates and latencies of collectives of a full group.

    A collective on n devices with a buffer of s bytes (the NCCL tests' "size") takes
    ``latency_s + step_s * steps(n) + traffic / bytes_per_s + ramp_s * s / (s + ramp_bytes)``, where ``traffic / time``
    is the NCCL tests' "bus bandwidth".  The last term is the time to fill the transport's pipeline; it is why
    medium-sized messages stay far below the peak.

    Args:
        name: for messages.
        all_reduce_bytes_per_s: bus bandwidth of an all-reduce, with in-network reduction where the link has
            it.
        gather_bytes_per_s: bus bandwidth of all-gather, reduce-scatter and broadcast.
        exchange_bytes_per_s: bus bandwidth of all-to-all.  For a link between nodes all three are per
            *device*, with all devices of a node sending at the same time.
        latency_s: of any collective, however small.
        step_s: additional latency of each step from device to device (from node to node on a link between nodes).
        ring_step_s: between nodes, the latency that each device adds to the ring of an all-gather or reduce-scatter;
            0: `step_s` for each node instead.
        ramp_s: the maximum of the time that is lost while the pipeline fills.
        ramp_bytes: buffer size at which half of `ramp_s` is lost.
        nodes_at_half_rate: for a link between nodes, the number of nodes whose congestion halves the rate; m nodes get
            ``1 / (1 + m / nodes_at_half_rate)`` of it.
        is_mesh: each pair of devices has a wire of its own, so that a group of n uses (n-1)/(all-1) of the
            bandwidth.
        sources: field name -> the source of the number.
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
    """Seconds of one op on local tensors, forward and backward, and their source.

    `source` is one of ``"layers"`` (the op's layer was timed as a whole), ``"scaled"`` (other layers of its kind were),
    ``"measured"`` (similar ops were), ``"published"``, ``"calibrated"`` and ``"estimate"``.
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
            allowed = "in (0, 1]" if name in fractions else "at least 0" if name in others else "positive"
            raise MeshError(f"{type(thing).__name__} {thing.name!r}: {name} must be {allowed} and finite, got {value}")
