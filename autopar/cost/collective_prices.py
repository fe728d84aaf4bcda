"""Seconds of a collective from the description of a cluster's links.

A group of n ranks on m nodes, with g ranks in each of them, communicates inside nodes and between them at the same
time:

``time(s) = latency + s * max(share_within / rate_within, share_between / rate_between) + ramp * s / (s +
ramp_bytes)``

where s is the NCCL tests' "size", and the shares are what one device sends over each link, relative to s:

============== ==================== =======================
kind           share_within         share_between
============== ==================== =======================
all_gather     (n-1)/n              (m-1)/m / g
reduce_scatter (n-1)/n              (m-1)/m / g
all_reduce     2 (n-1)/n            2 (m-1)/m / g
all_to_all     (g-1)/n              (n-g)/n
broadcast      1                    1 / g
send           1                    1
============== ==================== =======================

A send goes from each rank of an axis to the next one, as between the stages of a pipeline.  If some neighbors share a
node and others don't, it is priced as between nodes, because a pipeline waits for the slowest hop.

All the groups of an axis run the same collective at the same time.  That is why the rate between nodes is
per device: the other devices of the node send for their own groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster import Cluster, Link
from autopar.errors import MissingPriceError
from autopar.placement import Axis

__all__ = ["COLLECTIVES", "CollectiveTerms", "collective_terms", "traffic_share"]

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "send")


@dataclass(frozen=True)
class CollectiveTerms:
    """The closed form of one collective on one axis; see the formula in the module's docstring."""

    latency_s: float
    s_per_byte: float
    ramp_s: float
    ramp_bytes: float

    def seconds(self, num_bytes: float) -> float:
        """Seconds for a buffer of this size."""
        return self.latency_s + num_bytes * (self.s_per_byte + self.ramp_s / (num_bytes + self.ramp_bytes))


def check_kind(kind: str) -> None:
    """Raise `MissingPriceError` for a collective that has no price."""
    if kind not in COLLECTIVES:
        raise MissingPriceError(f"collective {kind!r} has no price; prices exist for {', '.join(COLLECTIVES)}")


def traffic_share(kind: str, size: int) -> float:
    """The bytes that one of `size` devices sends, relative to the buffer: the NCCL tests' bus bandwidth factor."""
    check_kind(kind)
    if kind in ("broadcast", "send"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (size - 1) / size


def collective_terms(cluster: Cluster, kind: str, axis: Axis) -> CollectiveTerms:
    """The closed form of `kind` on `axis`.

    Raises:
        MissingPriceError: this kind has no price.
    """
    check_kind(kind)
    if axis.size <= 1:
        return CollectiveTerms(0.0, 0.0, 0.0, 1.0)
    per_node, num_nodes = axis.by_node(cluster.devices_per_node)
    if kind == "send" and num_nodes > 1:
        return _terms_across(cluster, kind, 2, 1, 2)
    if kind == "send":
        return _terms_within(cluster, kind, 2)
    if num_nodes == 1:
        return _terms_within(cluster, kind, axis.size)
    return _terms_across(cluster, kind, axis.size, per_node, num_nodes)


def _terms_within(cluster: Cluster, kind: str, size: int) -> CollectiveTerms:
    link = cluster.within
    return CollectiveTerms(
        link.latency_s + link.step_s * (size - 1),
        traffic_share(kind, size) / _rate_within(cluster, kind, size),
        _ramp_s(link, kind),
        link.ramp_bytes,
    )


def _terms_across(cluster: Cluster, kind: str, size: int, per_node: int, num_nodes: int) -> CollectiveTerms:
    within, between = cluster.within, cluster.between
    share_within, share_between = _shares(kind, size, per_node, num_nodes)
    within_s = share_within / _rate_within(cluster, kind, cluster.devices_per_node) if share_within else 0.0
    return CollectiveTerms(
        between.latency_s + _steps_s(between, kind, size, num_nodes) + within.step_s * (per_node - 1),
        max(
            within_s,
            share_between / _rate(between, kind) * (1 + num_nodes / between.nodes_at_half_rate),
        ),
        _ramp_s(between, kind),
        between.ramp_bytes,
    )


def _shares(kind: str, size: int, per_node: int, num_nodes: int) -> tuple[float, float]:
    """The bytes that one device sends inside its node and to other nodes, relative to the buffer."""
    if kind == "all_to_all":
        return (per_node - 1) / size, (size - per_node) / size
    within = traffic_share(kind, size) if per_node > 1 else 0.0
    return within, traffic_share(kind, num_nodes) / per_node


def _steps_s(between: Link, kind: str, size: int, num_nodes: int) -> float:
    """The latency of all sequential steps: a ring goes through every device, a tree from node to node."""
    if kind in ("all_gather", "reduce_scatter") and between.ring_step_s:
        return between.ring_step_s * (size - 1)
    return between.step_s * _num_hops(kind, num_nodes)


def _num_hops(kind: str, num_nodes: int) -> int:
    """The number of sequential steps from node to node: a tree up and down, a ring, or pairs."""
    if kind == "all_reduce":
        return 2 * math.ceil(math.log2(num_nodes))
    return math.ceil(math.log2(num_nodes)) if kind == "all_to_all" else num_nodes - 1


def _rate(link: Link, kind: str) -> float:
    if kind == "all_reduce":
        return link.all_reduce_bytes_per_s
    return link.exchange_bytes_per_s if kind in ("all_to_all", "send") else link.gather_bytes_per_s


def _rate_within(cluster: Cluster, kind: str, size: int) -> float:
    """The bus bandwidth of a group inside a node.

    On a mesh a group uses only part of the wires.  NCCL uses in-switch reduction only for groups larger than half a
    node (published: HW-0195 to HW-0214).
    """
    link = cluster.within
    if link.is_mesh:
        return _rate(link, kind) * min(1.0, (size - 1) / max(1, cluster.devices_per_node - 1))
    if kind == "all_reduce" and 2 * size <= cluster.devices_per_node:
        return min(link.all_reduce_bytes_per_s, link.gather_bytes_per_s)
    return _rate(link, kind)


def _ramp_s(link: Link, kind: str) -> float:
    """The `Link.ramp_s` of a collective: an all-reduce fills the pipeline twice, the others once."""
    return link.ramp_s if kind == "all_reduce" else link.ramp_s / 2
