"""The cluster that the processes of a mesh run on, and its prices."""

from __future__ import annotations

import socket
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.cost.measure import CACHE_DIR, default_dtypes, measure_profile
from autopar.cost.measure.machine import device_name
from autopar.cost.profile import Profile
from autopar.cost.profile_file import load_profile
from autopar.errors import MeshError
from autopar.lower.communication.consensus import agree, share
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.user_text.progress import phase
from autopar.user_text.suggestions import kind_of

__all__ = ["Place", "check_places", "mesh_cluster", "mesh_prices", "read_cluster"]

_dist: Any = dist  # the annotations of its object collectives are incomplete


class Place(NamedTuple):
    """Where a rank runs: the device's own name, and its host."""

    device: str
    host: str


def mesh_cluster(mesh: DeviceMesh, communicator: ProcessGroupCommunicator) -> Cluster:
    """The cluster of `mesh`; every rank calls this.

    Raises:
        MeshError: its devices or its nodes differ.
    """
    if mesh.device_type == "cpu":
        return Cluster.from_mesh(mesh)
    own = Place(device_name(communicator.device), f"{socket.gethostname()}/{uuid.getnode():x}")
    places: list[Any] = [None] * communicator.world_size
    _dist.all_gather_object(places, own, group=communicator.process_group)
    per_node = check_places(places)
    return agree(communicator.process_group, lambda: Cluster.from_mesh(mesh, per_node, own.device))


def check_places(places: list[Place]) -> int:
    """How many ranks each host has.

    Raises:
        MeshError: devices differ, or hosts have different numbers of ranks: no plan knows which rank is slower.
    """
    advice = "Start one job for each kind of node, or leave the others out of the mesh"
    for rank, place in enumerate(places):
        if place.device != places[0].device:
            raise MeshError(
                f"the mesh has unlike devices: rank 0 runs on {places[0].device!r}, rank {rank} on {place.device!r} "
                f"(host {place.host}). autopar plans for equal nodes of equal devices only. {advice}"
            )
    counts = Counter(place.host for place in places)
    few, many = min(counts, key=lambda host: counts[host]), max(counts, key=lambda host: counts[host])
    if counts[few] != counts[many]:
        raise MeshError(
            f"the mesh has unlike nodes: host {few} has {counts[few]} of its ranks, host {many} has {counts[many]}. "
            f"autopar plans for equal nodes of equal devices only. {advice}"
        )
    return counts[few]


def mesh_prices(
    given: Profile | str | Path | Literal[False] | None,
    communicator: ProcessGroupCommunicator,
    mesh: DeviceMesh,
    dtype: torch.dtype | None = None,
    *,
    cache_dir: str | Path = CACHE_DIR,
) -> ClusterPrices:
    """The prices of `mesh`: from a given profile, measured (None) or estimated (False); every rank calls this.

    It measures only what is missing in this machine's profile, including products in `dtype`, and saves the results.

    Raises:
        MeshError: as `mesh_cluster`.
    """
    cluster, measured = mesh_cluster(mesh, communicator), None
    if given is None:
        dtypes = default_dtypes(communicator.device)
        if dtype is not None and dtype.is_floating_point:
            dtypes = tuple(dict.fromkeys((*dtypes, str(dtype).removeprefix("torch."))))
        with phase("measuring what this machine's profile lacks"):
            measured = measure_profile(communicator, mesh.device_type, cache_dir=cache_dir, dtypes=dtypes)
    elif given is not False:
        measured = share(communicator.process_group, lambda: load_profile(given))
    return agree(communicator.process_group, lambda: ClusterPrices(cluster, measured))


def read_cluster(cluster: object) -> Cluster:
    """The `cluster` of `autopar.plan`: one, or a mesh."""
    if isinstance(cluster, DeviceMesh):
        return Cluster.from_mesh(cluster)
    if not isinstance(cluster, Cluster):
        raise MeshError(f"cluster is {kind_of(cluster)}: pass a DeviceMesh, or a Cluster, such as Cluster.of('h100')")
    return cluster
