"""The cluster: devices and links as numbers, each with its source.  Knows no torch, no model and no plan.

>>> cluster = Cluster.of("h100", nodes=8, devices_per_node=8)
>>> cluster.world_size
64
>>> from dataclasses import replace
>>> slower = replace(cluster, between=replace(cluster.between, gather_bytes_per_s=10e9))

Every number has an entry in `sources` that starts with ``published`` (a measurement by others, or a data sheet),
``estimate`` (ours) or ``calibrated`` (fitted to published training runs, `benchmarks/published`; one value for all runs
on a device).  HW-... names rows of the table of published hardware figures with which the tests compare.
"""

from autopar.cluster.description import Cluster
from autopar.cluster.hardware import Device, HostLink, Link, OpTime, device_type_of
from autopar.cluster.links import LINKS

__all__ = ["LINKS", "Cluster", "Device", "HostLink", "Link", "OpTime", "device_type_of"]
