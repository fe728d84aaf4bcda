"""Links known by name, inside a node and between nodes, with the source of each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from autopar.cluster.hardware import Link

__all__ = ["LINKS"]


def _link(name: str, all_reduce: float, gather: float, exchange: float, **others: Any) -> Link:
    return Link(name, all_reduce * 1e9, gather * 1e9, exchange * 1e9, **others)


def _sources(rates: str, times: str) -> dict[str, str]:
    names = [part.name for part in fields(Link) if part.name.endswith("_s")]
    return {name: rates if "bytes" in name else times for name in names}


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


def _wires(name: str, one_way: float, source: str, **others: bool) -> Link:
    """A link of which only the nominal rate is known: 0.7 of it is reached, as of Infinity Fabric's 448 GB/s."""
    rate = 0.7 * one_way
    rates = f"{source}; estimate: 0.7 of it, as Infinity Fabric reaches"
    sources = _sources(rates, "estimate: as Infinity Fabric")
    return _link(name, rate, rate, rate, latency_s=20e-6, step_s=2e-6, ramp_s=100e-6, sources=sources, **others)


_HCCS = _wires(
    "HCCS, a wire for each pair", 196, "estimate: 7 wires of 28 GB/s one way, as no data sheet is public", is_mesh=True
)
_GAUDI3 = _wires(
    "21 ports of 200 GbE, 3 for each pair", 525, "published: the vendor's talk at Hot Chips 2024", is_mesh=True
)
_NEURONLINK3 = _wires(
    "NeuronLink-v3", 640, "published: 1.28 TB/s a chip (the vendor's architecture page), taken as both ways together"
)
_NDR = _link(
    "400 Gb/s per device, InfiniBand", 49, 33, 30, latency_s=50e-6, step_s=15e-6, ramp_s=320e-6,
    ramp_bytes=12 * 2.0**20, nodes_at_half_rate=256, ring_step_s=8e-6,
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
    "200 Gb/s per device, InfiniBand", 23.5, 20, 17.5, latency_s=50e-6, step_s=15e-6,
    ramp_s=320e-6, ramp_bytes=12 * 2.0**20, nodes_at_half_rate=256, ring_step_s=8e-6,
    sources={
        **_sources("estimate: half of a 400 Gb/s NIC (data sheet of the usual 8-device node)",
                   "estimate: as the 400 Gb/s NIC"),
        "ramp_bytes": "estimate: as the 400 Gb/s NIC", "nodes_at_half_rate": "estimate: as the 400 Gb/s NIC",
    },
)  # fmt: skip
_LOOPBACK = _link(
    "processes of one machine, over sockets", 1.0, 1.0, 1.0, latency_s=300e-6, step_s=100e-6,
    sources={part.name: "estimate: gloo; measure_profile measures the real one" for part in fields(Link)
             if part.name.endswith("_s")},
)  # fmt: skip


def _pcie(generation: int, bytes_per_s: float, source: str) -> Link:
    """A link through the host's PCIe switches: every transfer crosses a slot twice."""
    rate = 0.8 * bytes_per_s
    source = f"{source}; estimate: a ring through several slots gets 0.8 of it, pairs half of that"
    sources = _sources(source, "estimate: copies through the host's switches")
    return Link(f"PCIe {generation} x16", rate, rate, rate / 2, latency_s=20e-6, step_s=5e-6, sources=sources)


def _ethernet(gigabits: float) -> Link:
    """A TCP link without RDMA: a core copies what is sent, and each step wakes a process."""
    rate = 0.7 * gigabits / 8 * 1e9
    name = f"{gigabits:.0f} Gb/s per device, Ethernet over TCP"
    sources = _sources("estimate: 0.7 of the NIC's rate, for copies by the host", "estimate: socket transports")
    return Link(name, rate, rate, 0.8 * rate, latency_s=150e-6, step_s=50e-6, sources=sources)


def _at(link: Link, gigabits: float, link_gigabits: float, name: str, source: str) -> Link:
    """`link` (of `link_gigabits`) with a nominal rate of `gigabits`, of which the same fraction is reached."""
    rates = ("all_reduce_bytes_per_s", "gather_bytes_per_s", "exchange_bytes_per_s")
    scaled = {rate: getattr(link, rate) * gigabits / link_gigabits for rate in rates}
    return replace(link, name=name, sources={**link.sources, **dict.fromkeys(rates, source)}, **scaled)


_AS_INFINIBAND = "estimate: as InfiniBand of the same rate; calibrated: errors of published runs on RoCE are within 6 %"

_QUARTER = "estimate: a quarter of 200 Gb/s, 2 NICs for 8 devices; 64 devices' all-to-alls as FlexSP's solver has them"
LINKS: Mapping[str, Link] = {
    "nvlink3": _NVLINK3,
    "nvlink4": _NVLINK4,
    "nvlink5": _NVLINK5,
    "infinity-fabric": _XGMI,
    "hccs": _HCCS,
    "gaudi3-roce": _GAUDI3,
    "neuronlink3": _NEURONLINK3,
    "pcie4": _pcie(4, 27e9, "estimate: half of PCIe 5"),
    "pcie5": _pcie(5, 55e9, "published: HW-0249, HW-0250"),
    "infiniband-200": _HDR,
    "infiniband-400": _NDR,
    "infiniband-50": _at(_HDR, 50, 200, "50 Gb/s per device, InfiniBand", _QUARTER),
    "roce-50": _at(_HDR, 50, 200, "50 Gb/s per device, RoCE", _AS_INFINIBAND),
    "roce-200": _at(_HDR, 200, 200, "200 Gb/s per device, RoCE", _AS_INFINIBAND),
    "roce-600": _at(_NDR, 600, 400, "600 Gb/s per device, RoCE", _AS_INFINIBAND),
    "roce-400": _at(_NDR, 400, 400, "400 Gb/s per device, RoCE", _AS_INFINIBAND),
    "efa-50": _at(_HDR, 50, 200, "50 Gb/s per device, EFA", "published: HW-0043 to HW-0047, 4 NICs for 8 devices"),
    "efa-200": _at(_HDR, 200, 200, "200 Gb/s per device, EFA", "estimate: as InfiniBand of the same rate"),
    "efa-400": _EFA4,
    "ethernet-100": _ethernet(100),
    "ethernet-10": _ethernet(10),
    "loopback": _LOOPBACK,
}
