"""The cluster of a row: the preset of its device, with the network that the row names."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from autopar.cluster import Cluster, Device, Link
from autopar.cost import ClusterPrices
from benchmarks.published.calibration import OF_INFINIBAND, Calibration
from benchmarks.published.runs import Run, UnpricedRowError

__all__ = ["preset_of", "prices_of"]

# Four of them on a board, GH200 too: each pair has NVLink wires of its own, without a switch (NVIDIA's descriptions of
# HGX A100 4-GPU and HGX H100 4-GPU).
_WITHOUT_SWITCH = ("a100-40gb", "a100-80gb", "h100", "h200", "h100-500w")
_RACK_DEVICES = 64  # of the 72 that share NVLink in an NVL72 rack, jobs of a power of two use so many


class _Kind(NamedTuple):
    """Devices that rows name, and how they differ from a preset, by the vendor's data sheets.

    Args:
        pattern: what the row's device matches.
        preset: the device it is closest to.
        watts: the board's power limit; what is sustained goes with it.
        nic_gbits: what the bus of one device carries; a faster network is one of the node.
        rate: of products, relative to the preset.
        memory_bytes_per_s: 0 if the preset's.
        within: rate of the links inside a node relative to the preset's, or another link's name.
    """

    pattern: str
    preset: str
    watts: float
    nic_gbits: float
    rate: float = 1.0
    memory_bytes_per_s: float = 0.0
    within: float | str = 1.0


_PCIE = r"(?!.*(nvlink|sxm)).*(pci-?e|nvl\b)"
_KINDS = (
    _Kind("gb300", "gb300", 1400, 1024),
    _Kind("b300", "gb300", 1100, 1024, rate=0.9),  # DGX B300: 4.5 instead of 5 PFLOP/s in 8 bits
    _Kind("gb200", "gb200", 1200, 512),
    _Kind("b200", "b200", 1000, 512),
    _Kind("gh200", "h100", 700, 512, memory_bytes_per_s=4.0e12),
    _Kind("h200", "h200", 700, 512),
    _Kind("h800" + _PCIE, "h100", 350, 512, rate=0.764, memory_bytes_per_s=2.0e12, within="pcie5"),
    _Kind("h800", "h100", 700, 512, within=400 / 900),
    _Kind(r"h100(?=.*(500 ?w|hbm2e))(?!.*pci)", "h100-500w", 500, 512),
    _Kind(r"h100(?!.*(nvlink|sxm)).*nvl\b", "h100", 400, 512, rate=0.844, memory_bytes_per_s=3.9e12, within="pcie5"),
    _Kind("h100" + _PCIE, "h100", 350, 512, rate=0.764, memory_bytes_per_s=2.0e12, within="pcie5"),
    _Kind("h100", "h100", 700, 512),
    _Kind("mi325", "mi300x", 1000, 512, memory_bytes_per_s=6.0e12),
    _Kind("mi300x", "mi300x", 750, 512),
    _Kind("a800" + _PCIE, "a100-80gb", 300, 256, memory_bytes_per_s=1.935e12, within="pcie4"),
    _Kind("a800", "a100-80gb", 400, 256, within=400 / 600),
    _Kind("a100(?=.*40 ?g)" + _PCIE, "a100-40gb", 250, 256, within="pcie4"),
    _Kind("a100" + _PCIE, "a100-80gb", 300, 256, memory_bytes_per_s=1.935e12, within="pcie4"),
    _Kind(r"a100(?=.*\b40 ?g)", "a100-40gb", 400, 256),
    _Kind("a100", "a100-80gb", 400, 256),
    _Kind(r"v100", "a100-40gb", 300, 128, rate=125 / 312, memory_bytes_per_s=0.9e12, within=300 / 600),
)
"""The first that matches counts.  V100: with the A100's efficiencies, an estimate."""


def _kind_of(gpu: str) -> _Kind:
    text = re.sub(r"[_-]+", " ", gpu.lower())
    found = next((kind for kind in _KINDS if re.search(kind.pattern, text)), None)
    if found is None:
        raise UnpricedRowError(f"no preset for {gpu!r}")
    return found


def preset_of(gpu: str) -> str:
    """The name of the preset for a row's device.

    Raises:
        UnpricedRowError: there is none.
    """
    return _kind_of(gpu).preset


def prices_of(run: Run, calibration: Calibration) -> ClusterPrices:
    """Prices on the cluster of a row.

    Raises:
        UnpricedRowError: there is no preset for the row's device, or it can't compute in the row's precision.
    """
    kind = _kind_of(run.gpu)
    fraction = calibration.sustained.get(kind.preset, 0.0)
    share = _power_share(kind, run.gpu, calibration)
    if share != 1.0:
        fraction = (fraction or Cluster.of(kind.preset).device.sustained_fraction) * share
    ring = calibration.omni_path if "omni-path" in run.interconnect.lower() else 1.0
    if _ON_ETHERNET.search(run.interconnect.lower()) and "EFA" not in Cluster.of(kind.preset).between.name:
        ring *= OF_INFINIBAND
    per_node = _RACK_DEVICES if re.search(r"nvl ?72", run.gpu.lower()) else run.devices_per_node
    num_nodes = max(1, math.ceil(run.num_devices / per_node))
    gigabits = _gigabits_per_device(run.interconnect, run.devices_per_node, kind.nic_gbits)
    key = _Key(
        kind, num_nodes, per_node, fraction, gigabits, ring, re.search("fp4|float4", run.precision.lower()) is not None
    )
    return _prices(key)


def _power_share(kind: _Kind, gpu: str, calibration: Calibration) -> float:
    """What a device with less power than the preset keeps of what that sustains."""
    usual = {"h100-500w": 500.0, "gb300": 1400.0}.get(kind.preset, _WATTS.get(kind.preset, kind.watts))
    stated = re.search(r"\b(\d{3,4}) ?w\b", gpu.lower())
    watts = min(float(stated[1]), kind.watts) if stated else kind.watts
    limited = calibration.power_limited if "power limited" in gpu.lower().replace("-", " ") and not stated else 1.0
    return min(1.0, watts / (usual * kind.rate)) * limited


_WATTS = {
    "a100-40gb": 400.0, "a100-80gb": 400.0, "h100": 700.0, "h200": 700.0, "b200": 1000.0, "gb200": 1200.0,
    "mi300x": 750.0,
}  # fmt: skip


class _Key(NamedTuple):
    """What prices of rows depend on; 0 leaves the preset's number."""

    kind: _Kind
    num_nodes: int
    per_node: int
    fraction: float
    gigabits: float
    ring: float
    in_four_bits: bool


@lru_cache(maxsize=512)
def _prices(key: _Key) -> ClusterPrices:
    kind = key.kind
    named = {"within": kind.within} if isinstance(kind.within, str) else {}
    cluster = Cluster.of(kind.preset, key.num_nodes, key.per_node, **named)
    device = _in_four_bits(cluster.device) if key.in_four_bits else cluster.device
    device = replace(
        device,
        sustained_fraction=key.fraction or device.sustained_fraction,
        memory_bytes_per_s=kind.memory_bytes_per_s or device.memory_bytes_per_s,
        flops_per_s={dtype: rate * kind.rate for dtype, rate in device.flops_per_s.items()},
    )
    within = cluster.within if isinstance(kind.within, str) else _times(cluster.within, kind.within)
    if key.per_node == 4 and kind.preset in _WITHOUT_SWITCH and not isinstance(kind.within, str):
        within = replace(within, is_mesh=True, all_reduce_bytes_per_s=within.gather_bytes_per_s)
    between = _scaled(cluster.between, key.gigabits, key.ring)
    return ClusterPrices(replace(cluster, device=device, within=within, between=between))


def _in_four_bits(device: Device) -> Device:
    """Products in 8 bits at the rate of 4: they are taken to reach the same part of the data sheet's peak."""
    peak = device.flops_per_s.get("float4_e2m1fn_x2")
    if peak is None:
        raise UnpricedRowError(f"{device.name} has no products in 4 bits")
    return replace(device, flops_per_s={**device.flops_per_s, "float8_e4m3fn": peak})


_ON_ETHERNET = re.compile(r"^(?!.*(infiniband|\bib\b|omni)).*(roce|rdma|efa\b|slingshot|ethernet)")
_NAMED_RATES = {"xdr": 800.0, "ndr": 400.0, "hdr": 200.0, "edr": 100.0}


def _gigabits_per_device(text: str, per_node: int, most: float) -> float:
    """What a row's interconnect column says about the network, per device; 0 if nothing.

    A rate without a word of whom it serves is that of a device if its bus carries `most` as much, else of a node.
    """
    for part in re.split(r"[;,]", text.lower()):
        if re.search(r"nvlink|nvswitch|infinity|xgmi|pci", part) and not re.search(
            r"node|infiniband|\bib\b|roce|efa", part
        ):
            continue
        found = re.search(r"(?:(\d+) ?[x*] ?)?(\d+(?:\.\d+)?) ?(tb|gb|g)(ytes?|its?)?(?:/s|ps|e\b|\b)", part)
        named = re.search(r"(?:(\d+) ?[x*] ?)?(?:\w+ )?\b(xdr|ndr|hdr|edr)\b", part)
        if found is None and named is None:
            continue
        if found:
            count = found[1] or (links[1] if (links := re.search(r"(\d+) [\w-]+ links", part)) else None)
            rate = float(found[2]) * (1000 if found[3] == "tb" else 1)
            rate *= 8 if re.search(r"\d ?[TGtg]B(ytes?)?(/s|ps)", _same_part(text, part)) else 1
        else:
            count, rate = (named[1], _NAMED_RATES[named[2]]) if named else (None, 0.0)
        if re.search(r"per (gpu|device)|/gpu|each gpu", part):
            return rate
        if count:
            return int(count) * rate / per_node
        return rate / per_node if rate > most or re.search(r"node|host|server|instance", part) else rate
    return 0.0


def _same_part(text: str, part: str) -> str:
    """`part` as it was spelled: bytes and bits differ by case."""
    start = text.lower().find(part)
    return text[start : start + len(part)]


def _times(link: Link, scale: float) -> Link:
    return replace(
        link,
        all_reduce_bytes_per_s=link.all_reduce_bytes_per_s * scale,
        gather_bytes_per_s=link.gather_bytes_per_s * scale,
        exchange_bytes_per_s=link.exchange_bytes_per_s * scale,
    )


def _scaled(link: Link, gigabits: float, ring: float) -> Link:
    """`link` at another nominal rate (0: its own): the same part is reached, by collectives only `ring` of that."""
    nominal = 50e9 if link.all_reduce_bytes_per_s > 30e9 else 25e9
    scale = gigabits / 8 * 1e9 / nominal if gigabits else 1.0
    slower = _times(link, scale * ring)
    return replace(slower, exchange_bytes_per_s=link.exchange_bytes_per_s * scale)
