"""The cluster of a row: the preset of its device, with the network that the row names."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from autopar.cluster import Cluster, Device, Link
from autopar.cost import ClusterPrices
from benchmarks.published.calibration import Calibration
from benchmarks.published.runs import Run, UnpricedRowError

__all__ = ["preset_of", "prices_of"]

_GPUS = ("gb300", "gb200", "b200", "h200", "h100", "mi300x", "a100")
_RACK_DEVICES = 64  # of the 72 that share NVLink in an NVL72 rack, jobs of a power of two use so many


def preset_of(gpu: str) -> str:
    """The name of the preset for a row's device.

    Raises:
        UnpricedRowError: there is none.
    """
    text = gpu.lower()
    name = next((known for known in _GPUS if known in text), None)
    if name is None:
        raise UnpricedRowError(f"no preset for {gpu!r}")
    if name == "a100":
        return "a100-40gb" if "40gb" in text else "a100-80gb"
    return "h100-500w" if name == "h100" and "500w" in text else name


def prices_of(run: Run, calibration: Calibration) -> ClusterPrices:
    """Prices on the cluster of a row."""
    name = preset_of(run.gpu)
    fraction = calibration.sustained.get(name, 0.0)
    if "power limited" in run.gpu:
        fraction = (fraction or Cluster.of(name).device.sustained_fraction) * calibration.power_limited
    ring = calibration.omni_path if "Omni-Path" in run.interconnect else 1.0
    per_node = _RACK_DEVICES if "nvl72" in run.gpu.lower() else run.devices_per_node
    num_nodes = max(1, math.ceil(run.num_devices / per_node))
    gigabits = _gigabits_per_device(run.interconnect, run.devices_per_node)
    key = _Key(name, num_nodes, per_node, fraction, gigabits, ring, "fp4" in run.precision.lower())
    return _prices(key)


class _Key(NamedTuple):
    """What prices of rows depend on; 0 leaves the preset's number."""

    name: str
    num_nodes: int
    per_node: int
    fraction: float
    gigabits: float
    ring: float
    in_four_bits: bool


@lru_cache(maxsize=512)
def _prices(key: _Key) -> ClusterPrices:
    cluster = Cluster.of(key.name, key.num_nodes, key.per_node)
    device = _in_four_bits(cluster.device) if key.in_four_bits else cluster.device
    device = replace(device, sustained_fraction=key.fraction or device.sustained_fraction)
    between = _scaled(cluster.between, key.gigabits, key.ring) if key.gigabits else cluster.between
    return ClusterPrices(replace(cluster, device=device, between=between))


def _in_four_bits(device: Device) -> Device:
    """Products in 8 bits at the rate of 4: they are taken to reach the same part of the data sheet's peak."""
    peak = device.flops_per_s.get("float4_e2m1fn_x2")
    if peak is None:
        raise UnpricedRowError(f"{device.name} has no products in 4 bits")
    return replace(device, flops_per_s={**device.flops_per_s, "float8_e4m3fn": peak})


def _gigabits_per_device(text: str, per_node: int) -> float:
    """What a row's interconnect column says about the network, per device; 0 if nothing."""
    for pattern in (r"(\d+)\s*x\s*(\d+) Gb/s[^;]* per node", r"(\d+) [\w-]+ links \((\d+) Gb/s class\) per node"):
        if found := re.search(pattern, text):
            return int(found[1]) * int(found[2]) / per_node
    if found := re.search(r"(\d+) Gb(?:ps|/s)/node", text):
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
