"""The cluster: devices and links as numbers, each with where it comes from.  Knows no torch, no model, no
plan.

>>> cluster = Cluster.of("h100", nodes=8, devices_per_node=8)
>>> cluster.world_size
64
>>> from dataclasses import replace
>>> slower = replace(cluster, between=replace(cluster.between, gather_bytes_per_s=10e9))

Every number has an entry in `sources` that starts with ``published`` (somebody's measurement or a data
sheet) or with
``estimate`` (ours).  HW-... names rows of the table of published hardware figures that the tests compare
with.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, cast

from autopar.errors import MeshError

__all__ = ["Cluster", "Device", "Link", "OpTime"]


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
        launch_s: what one kernel costs besides its work.
        sustained_fraction: part of its rate in matrix products that the device keeps under minutes of load, when
            power and heat lower its clock.  Short benchmarks don't show it.
        new_attention_efficiency: as `attention_efficiency`, for kernels written for this generation of devices
            (FlashAttention-3, cuDNN's); 0 if there are none.
        reserved_memory_bytes: taken before the program starts: context, communicators, workspaces.
        usable_memory_fraction: part of the rest that a plan may fill; the remainder is for fragmentation.
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
    sources: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)

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
        others = ("launch_s", "reserved_memory_bytes", "new_attention_efficiency")
        _check_numbers(self, positive=positive, fractions=fractions, others=others)
        wrong = {dtype: rate for dtype, rate in self.flops_per_s.items() if not rate > 0}
        if wrong:
            raise MeshError(f"device {self.name!r}: flops_per_s must be positive, got {wrong}")

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes that a plan may fill."""
        return max(0.0, self.memory_bytes - self.reserved_memory_bytes) * self.usable_memory_fraction


@dataclass(frozen=True)
class Link:
    """What connects devices, as the collectives of a full group see it.

    A collective on n devices with a buffer of s bytes (the NCCL tests' "size") takes
    ``latency_s + step_s * steps(n) + traffic / bytes_per_s + ramp_s * s / (s + ramp_bytes)``, where
    ``traffic / time``
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
class Cluster:
    """Equal nodes of equal devices.  Rank r is device ``r % devices_per_node`` of node ``r //
    devices_per_node``.

    Args:
        device: what each rank runs on.
        devices_per_node: how many neighbouring ranks share `within`.
        num_nodes: how many such nodes.
        within: the link inside a node.
        between: the link from node to node; its rates are per device.
    """

    device: Device
    devices_per_node: int
    num_nodes: int
    within: Link
    between: Link

    def __post_init__(self) -> None:
        """Refuse an empty cluster."""
        if self.devices_per_node < 1 or self.num_nodes < 1:
            raise MeshError(
                f"a cluster needs at least one node with one device, got num_nodes={self.num_nodes}, "
                f"devices_per_node={self.devices_per_node}"
            )

    @property
    def world_size(self) -> int:
        """How many devices there are."""
        return self.num_nodes * self.devices_per_node

    @classmethod
    def of(cls, name: str, nodes: int = 1, devices_per_node: int = 8) -> Self:
        """A cluster of a well-known device: one of ``Cluster.names()``.

        Raises:
            MeshError: the name is unknown, or a count is below 1.
        """
        key = _ALIASES.get(name.lower(), name.lower())
        if key not in _DEVICES:
            raise MeshError(
                f"no numbers are known for a device called {name!r}; known are {', '.join(cls.names())}. "
                "Describe others: Cluster(Device(...), devices_per_node, num_nodes, Link(...), Link(...))"
            )
        device, within = _DEVICES[key]
        return cls(device, devices_per_node, nodes, within, _LOOPBACK if key == "cpu" else _BETWEEN.get(key, _NDR))

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names that `Cluster.of` knows."""
        return tuple(sorted(_DEVICES | _ALIASES))

    @classmethod
    def from_mesh(cls, mesh: Any, devices_per_node: int | None = None, device_name: str | None = None) -> Self:
        """The cluster that a `torch.distributed.DeviceMesh` spans.

        Args:
            mesh: needs ``size()`` and ``device_type`` only; its order is taken as the order of nearness.
            devices_per_node: as many as this machine shows, if not given; all of the mesh for CPU processes.
            device_name: what the driver calls the device, if not given.

        Raises:
            MeshError: the mesh is empty, its device is not known, or its size is no multiple of a node's
                devices.
        """
        world, kind = int(mesh.size()), str(mesh.device_type)
        if world < 1:
            raise MeshError("the mesh holds no device")
        if kind == "cpu":
            return cls._of_cpu(world, devices_per_node or world)
        if kind != "cuda":
            raise MeshError(f"a mesh of {kind!r} devices can't be priced; use a 'cuda' or 'cpu' mesh or pass a Cluster")
        cuda = sys.modules["torch"].cuda if device_name is None or devices_per_node is None else None
        found = device_name if cuda is None or device_name is not None else str(cuda.get_device_name())
        per_node = devices_per_node or min(world, int(cast(Any, cuda).device_count()))
        return cls.of(_preset_of(str(found)), _num_nodes(world, per_node), per_node)

    @classmethod
    def _of_cpu(cls, world: int, per_node: int) -> Self:
        plain = cls.of("cpu", _num_nodes(world, per_node), per_node)
        source = "published: the operating system's physical memory, shared by the node's processes"
        sources = {**plain.device.sources, "memory_bytes": source}
        device = replace(plain.device, memory_bytes=_physical_memory_bytes() / per_node, sources=sources)
        return replace(plain, device=device)

    def save(self, path: str | Path) -> None:
        """Write the cluster as readable JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            MeshError: the file is not a cluster's JSON.
        """
        return cls.from_json(Path(path).read_text())

    def to_json(self) -> str:
        """The cluster as readable JSON."""
        return json.dumps({"autopar_cluster": 1, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            MeshError: `text` is not a cluster's JSON.
        """
        try:
            data = cast(dict[str, Any], json.loads(text))
            if data.pop("autopar_cluster") != 1:
                raise ValueError("autopar_cluster is not 1")
            device, within, between = (
                Device(**data.pop("device")), Link(**data.pop("within")), Link(**data.pop("between"))
            )  # fmt: skip
            return cls(device=device, within=within, between=between, **data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            names = ", ".join(part.name for part in fields(cls))
            raise MeshError(
                f"this is not the JSON of a cluster ({type(error).__name__}: {error}); it needs "
                f"autopar_cluster=1 and {names}, as Cluster.save writes them"
            ) from error


@dataclass(frozen=True)
class OpTime:
    """Seconds that one op takes on local tensors, forward and backward apart, and where the numbers come
    from.

    `source` is one of ``"profile"``, ``"measured"``, ``"published"``, ``"roofline"``.
    """

    forward_s: float
    backward_s: float
    source: str


def _check_numbers(
    thing: Device | Link, positive: tuple[str, ...], fractions: tuple[str, ...], others: tuple[str, ...]
) -> None:
    for name in positive + fractions + others:
        value: Any = getattr(thing, name)
        low = value >= 0 if name in others else value > 0
        if not low or value == float("inf") or (name in fractions and value > 1):
            wanted = "in (0, 1]" if name in fractions else "at least 0" if name in others else "positive"
            raise MeshError(f"{type(thing).__name__} {thing.name!r}: {name} must be {wanted} and finite, got {value}")


def _num_nodes(world: int, per_node: int) -> int:
    if world % per_node:
        raise MeshError(
            f"a mesh of {world} devices is no multiple of the {per_node} devices of a node; pass devices_per_node"
        )
    return world // per_node


def _preset_of(found: str) -> str:
    """The preset for a driver's device name such as ``NVIDIA H100 80GB HBM3``."""
    text = found.lower()
    if "a100" in text:
        return "a100-40gb" if "40gb" in text else "a100-80gb"
    for name in ("h100", "h200", "gb200", "gb300", "b200", "mi300x"):
        if name in text and "g" + name not in text:
            return name
    raise MeshError(
        f"no numbers are known for the device {found!r}; known are {', '.join(Cluster.names())}. "
        "Pass a Cluster instead of a mesh, or measure this device: autopar.cost.measure.measure_profile"
    )


def _physical_memory_bytes() -> float:
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, float(text)) if text.isdigit() else total


_GIB = 2.0**30
_TFLOPS = 1e12
_SHEET = "published: the vendor's data sheet, dense"
_SHARE = "estimate: context 0.5 GB, communicator buffers and library workspaces 2 GB"


def _gpu_sources(memory: str, matmul: str, attention: str, copy: str) -> dict[str, str]:
    return {
        "memory_bytes": memory,
        "memory_bytes_per_s": _SHEET,
        "flops_per_s": _SHEET,
        "matmul_efficiency": matmul,
        "attention_efficiency": attention,
        "memory_efficiency": copy,
        "sustained_fraction": "estimate",
        "new_attention_efficiency": "estimate",
        "launch_s": "estimate: gap between dependent kernels of an eager program that keeps its queue full",
        "reserved_memory_bytes": _SHARE,
        "usable_memory_fraction": "estimate: 6 % for fragmentation",
    }


_SEEN = "published: the size that the driver reports to programs"


def _a100(gib: float, bytes_per_s: float) -> Device:
    return Device(
        name=f"A100-{'40GB' if gib < 50 else '80GB'}",
        memory_bytes=gib * _GIB,
        memory_bytes_per_s=bytes_per_s,
        flops_per_s={
            "bfloat16": 312 * _TFLOPS, "float16": 312 * _TFLOPS,
            "float32": 19.5 * _TFLOPS, "float64": 19.5 * _TFLOPS,
        },
        matmul_efficiency=0.84,
        attention_efficiency=0.63,
        memory_efficiency=0.775,
        launch_s=4e-6,
    sustained_fraction=0.85,
        reserved_memory_bytes=2.5e9,
        sources=_gpu_sources(
            _SEEN,
            "published: best shape 271.2 of 312 TFLOP/s (HW-0255), 0.90 without writing the result; "
            "estimate: 0.84 over usual shapes",
            "published: 195 of 312 TFLOP/s as the sequence grows, head dim 128, causal (FlashAttention-2, "
            "figure 4)",
            "published: a copy moves 1581.5 GB/s (HW-0251)",
        ),
    )  # fmt: skip


_H_FLOPS = {
    "bfloat16": 989 * _TFLOPS, "float16": 989 * _TFLOPS, "float32": 67 * _TFLOPS, "float64": 67 * _TFLOPS,
    "float8_e4m3fn": 1979 * _TFLOPS, "float8_e5m2": 1979 * _TFLOPS,
}  # fmt: skip
_H_MATMUL = (
    "published: best shape 794.5 of 989 TFLOP/s (HW-0258), 0.82 without the time to write the result; "
    "estimate: 0.76 over usual shapes"
)
_H_ATTENTION = "published: 335 of 989 TFLOP/s as the sequence grows, head dim 128, causal (FlashAttention-2, figure 7)"

_H100 = Device(
    name="H100-80GB",
    memory_bytes=79.1 * _GIB,
    memory_bytes_per_s=3.35e12,
    flops_per_s=_H_FLOPS,
    matmul_efficiency=0.76,
    attention_efficiency=0.34,
    memory_efficiency=0.75,
    launch_s=4e-6,
    sustained_fraction=0.85,
    reserved_memory_bytes=2.5e9,
    new_attention_efficiency=0.55,
    sources=_gpu_sources(_SEEN, _H_MATMUL, _H_ATTENTION, "published: a copy moves 2520 GB/s (HW-0252)"),
)
_H200 = Device(
    name="H200-141GB",
    memory_bytes=139.8 * _GIB,
    memory_bytes_per_s=4.8e12,
    flops_per_s=_H_FLOPS,
    matmul_efficiency=0.76,
    attention_efficiency=0.34,
    memory_efficiency=0.75,
    launch_s=4e-6,
    sustained_fraction=0.85,
    reserved_memory_bytes=2.5e9,
    new_attention_efficiency=0.55,
    sources=_gpu_sources(_SEEN, _H_MATMUL, _H_ATTENTION, "estimate: as H100"),
)
# Products slow down in proportion to the power that a device may draw: its own 500 W instead of 700 W.
_H100_500W = replace(
    _H100,
    name="H100-96GB-500W",
    memory_bytes=94.5 * _GIB,
    memory_bytes_per_s=2.4e12,
    sustained_fraction=0.85 * 500 / 700,
)
_B200 = Device(
    name="B200-180GB",
    memory_bytes=178.3 * _GIB,
    memory_bytes_per_s=8.0e12,
    flops_per_s={
        "bfloat16": 2250 * _TFLOPS, "float16": 2250 * _TFLOPS,
        "float32": 75 * _TFLOPS, "float64": 37 * _TFLOPS,
        "float8_e4m3fn": 4500 * _TFLOPS, "float8_e5m2": 4500 * _TFLOPS,
    },
    matmul_efficiency=0.78,
    attention_efficiency=0.15,
    new_attention_efficiency=0.5,
    memory_efficiency=0.725,
    launch_s=4e-6,
    sustained_fraction=0.75,
    reserved_memory_bytes=3e9,
    sources=_gpu_sources(
        _SEEN,
        "published: best shape 1745 of 2250 TFLOP/s (HW-0260); 0.84 without writing the result; "
        "estimate: 0.78 over usual shapes",
        "estimate: fused attention in torch before kernels made for this device",
        "published: a copy on a GB200 moves 5800 GB/s (HW-0253)",
    ),
)  # fmt: skip
_GB200 = replace(
    _B200,
    name="GB200-186GB",
    sustained_fraction=0.7,
    memory_bytes=184.0 * _GIB,
    flops_per_s={
        "bfloat16": 2500 * _TFLOPS, "float16": 2500 * _TFLOPS,
        "float32": 80 * _TFLOPS, "float64": 40 * _TFLOPS,
        "float8_e4m3fn": 5000 * _TFLOPS, "float8_e5m2": 5000 * _TFLOPS,
    },
    matmul_efficiency=0.76,
    sources={
        **_B200.sources,
        "matmul_efficiency": "published: best shape 1822 of 2500 TFLOP/s (HW-0262), 0.80 without writing the result; "
        "estimate: 0.76 over usual shapes",
    },
)  # fmt: skip
_GB300 = replace(_GB200, name="GB300-288GB", sustained_fraction=0.9, memory_bytes=277.0 * _GIB)
_MI300X = Device(
    name="MI300X-192GB",
    memory_bytes=191.5 * _GIB,
    memory_bytes_per_s=5.3e12,
    flops_per_s={
        "bfloat16": 1307 * _TFLOPS, "float16": 1307 * _TFLOPS,
        "float32": 163 * _TFLOPS, "float64": 163 * _TFLOPS,
        "float8_e4m3fn": 2614 * _TFLOPS, "float8_e5m2": 2614 * _TFLOPS,
    },
    matmul_efficiency=0.48,
    attention_efficiency=0.15,
    memory_efficiency=0.70,
    launch_s=6e-6,
    sustained_fraction=0.7,
    reserved_memory_bytes=3e9,
    sources=_gpu_sources(
        _SEEN,
        "published: best shape 668.4 TFLOP/s (HW-0265); estimate: 0.48 over usual shapes",
        "estimate: composable-kernel attention",
        "estimate: as A100, less 10 %",
    ),
)  # fmt: skip
_CPU = Device(
    name="cpu",
    memory_bytes=8e9,
    memory_bytes_per_s=10e9,
    flops_per_s={
        "float32": 50e9, "float64": 25e9, "bfloat16": 12e9, "float16": 6e9, "int64": 1e9, "int32": 1e9,
        "complex64": 10e9, "complex128": 5e9,
    },
    matmul_efficiency=0.8,
    attention_efficiency=0.4,
    memory_efficiency=0.7,
    launch_s=5e-6,
    reserved_memory_bytes=0.4e9,
    usable_memory_fraction=0.9,
    sources={name.name: "estimate: one core of a usual server; measure_profile measures the real one"
             for name in fields(Device) if name.name not in ("name", "sources")},
)  # fmt: skip


def _link(name: str, all_reduce: float, gather: float, exchange: float, **others: Any) -> Link:
    return Link(name, all_reduce * 1e9, gather * 1e9, exchange * 1e9, **others)


_FIT = "estimate: fitted to the same sweep"
_NVLINK3 = _link(
    "NVLink 3, NVSwitch", 235, 235, 215, latency_s=30e-6, step_s=1.5e-6, ramp_s=140e-6,
    sources={
        "all_reduce_bytes_per_s": "published: HW-0114, HW-0227",
        "gather_bytes_per_s": "estimate: as a ring all-reduce",
        "exchange_bytes_per_s": "estimate: 0.9 of a gather",
        "latency_s": _FIT, "step_s": _FIT, "ramp_s": _FIT, "ramp_bytes": _FIT,
    },
)  # fmt: skip
_NVLINK4 = _link(
    "NVLink 4, NVSwitch with in-switch reduction", 480, 362, 330, latency_s=10e-6, step_s=1e-6, ramp_s=80e-6,
    sources={
        "all_reduce_bytes_per_s": "published: HW-0001 to HW-0025, HW-0215",
        "gather_bytes_per_s": "published: HW-0217, HW-0218",
        "exchange_bytes_per_s": "estimate: 0.9 of a gather",
        "latency_s": _FIT, "step_s": _FIT, "ramp_s": _FIT, "ramp_bytes": _FIT,
    },
)  # fmt: skip
_NVLINK5 = _link(
    "NVLink 5, NVSwitch with in-switch reduction", 800, 680, 610, latency_s=20e-6, step_s=2e-6, ramp_s=60e-6,
    sources={
        "all_reduce_bytes_per_s": "published: HW-0135 to HW-0173 (740 at 4 GiB, 840 at 16 GiB)",
        "gather_bytes_per_s": "published: HW-0214, an all-reduce by ring",
        "exchange_bytes_per_s": "estimate: 0.9 of a gather",
        "latency_s": _FIT, "step_s": _FIT, "ramp_s": _FIT, "ramp_bytes": _FIT,
    },
)  # fmt: skip
_XGMI = _link(
    "Infinity Fabric, a wire for each pair", 313, 313, 300, latency_s=20e-6, step_s=2e-6,
    ramp_s=100e-6, is_mesh=True,
    sources={
        "all_reduce_bytes_per_s": "published: HW-0219, HW-0220",
        "gather_bytes_per_s": "estimate: as all-reduce",
        "exchange_bytes_per_s": "estimate: as all-reduce, less 4 %",
        "latency_s": "estimate", "step_s": "estimate", "ramp_s": "estimate", "ramp_bytes": "estimate",
    },
)  # fmt: skip
_NDR = _link(
    "400 Gb/s per device", 49, 33, 30, latency_s=50e-6, step_s=15e-6, ramp_s=320e-6, ramp_bytes=12 * 2.0**20,
    nodes_at_half_rate=256, ring_step_s=8e-6,
    sources={
        "all_reduce_bytes_per_s": "published: HW-0223 (46 to 48 GB/s a NIC); HW-0072 and HW-0077 agree",
        "gather_bytes_per_s": "estimate: between the NIC's rate and HW-0228 (25 GB/s on 32 nodes)",
        "exchange_bytes_per_s": "estimate: as a gather",
        "latency_s": "estimate: fitted to HW-0048 to HW-0072", "step_s": "estimate: the same",
        "ramp_s": "estimate: the same", "ramp_bytes": "estimate: the same",
        "ring_step_s": "estimate: fitted to HW-0239 to HW-0243 (upper ends) taken as 256 MB, and HW-0228 at 2 GiB",
        "nodes_at_half_rate": "estimate: fitted to HW-0075 (12 nodes) and HW-0229 (32 nodes)",
    },
)  # fmt: skip
_EFA4 = replace(
    _NDR,
    name="400 Gb/s per device, EFA",
    all_reduce_bytes_per_s=37e9,
    sources={**_NDR.sources, "all_reduce_bytes_per_s": "published: HW-0136 to HW-0174, 4 nodes"},
)
_HDR = _link(
    "200 Gb/s per device", 23.5, 20, 17.5, latency_s=50e-6, step_s=15e-6,
    ramp_s=320e-6, ramp_bytes=12 * 2.0**20, nodes_at_half_rate=256, ring_step_s=8e-6,
    sources=dict.fromkeys(
        ("all_reduce_bytes_per_s", "gather_bytes_per_s", "exchange_bytes_per_s"),
        "estimate: half of a 400 Gb/s NIC (data sheet of the usual 8-device node)",
    )
    | dict.fromkeys(
        ("latency_s", "step_s", "ramp_s", "ramp_bytes", "nodes_at_half_rate", "ring_step_s"),
        "estimate: as the 400 Gb/s NIC",
    ),
)  # fmt: skip
_LOOPBACK = _link(
    "processes of one machine, over sockets", 1.0, 1.0, 1.0, latency_s=300e-6, step_s=100e-6,
    sources={part.name: "estimate: gloo; measure_profile measures the real one" for part in fields(Link)
             if part.name.endswith("_s")},
)  # fmt: skip

_DEVICES: dict[str, tuple[Device, Link]] = {
    "a100-40gb": (_a100(39.4, 1.555e12), _NVLINK3),
    "a100-80gb": (_a100(79.2, 2.039e12), _NVLINK3),
    "h100": (_H100, _NVLINK4),
    "h100-500w": (_H100_500W, _NVLINK4),
    "h200": (_H200, _NVLINK4),
    "b200": (_B200, _NVLINK5),
    "gb200": (_GB200, _NVLINK5),
    "gb300": (_GB300, _NVLINK5),
    "mi300x": (_MI300X, _XGMI),
    "cpu": (_CPU, _LOOPBACK),
}
_ALIASES = {"a100": "a100-80gb"}
_BETWEEN = {"b200": _EFA4, "a100-40gb": _HDR, "a100-80gb": _HDR}
