"""The cluster: equal nodes of equal devices."""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from autopar.cluster.devices import DEVICES, unknown_device
from autopar.cluster.hardware import Device, Link
from autopar.cluster.links import LINKS
from autopar.errors import MeshError
from autopar.user_text.json_reading import check_fields, read_json

__all__ = ["Cluster"]

T = TypeVar("T")

_ALIASES = {"a100": "a100-80gb"}


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices.

    Rank r is device ``r % devices_per_node`` of node ``r // devices_per_node``.

    Args:
        device: the device of each rank.
        devices_per_node: the number of devices of a node, which `within` connects.
        num_nodes: the number of nodes.
        within: the link inside a node.
        between: the link between nodes; its rates are per device.
        cores_per_node: for CPU processes, the number of cores of a node; 0: unknown, or not CPU processes.

    Example:
        >>> autopar.Cluster.of("h100", nodes=8).world_size
        64
    """

    device: Device
    devices_per_node: int
    num_nodes: int
    within: Link
    between: Link
    cores_per_node: int = 0

    def __post_init__(self) -> None:
        """Refuse an empty cluster."""
        if self.devices_per_node < 1 or self.num_nodes < 1:
            raise MeshError(
                f"a cluster needs at least one node with one device, got num_nodes={self.num_nodes}, "
                f"devices_per_node={self.devices_per_node}"
            )

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return self.num_nodes * self.devices_per_node

    @property
    def is_unknown(self) -> bool:
        """Whether its devices have no preset, so that their speed is estimated where it was not measured."""
        return self.device == unknown_device(self.device.name, self.device.memory_bytes)

    @property
    def shares_cores(self) -> bool:
        """Whether a node is known to have fewer cores than processes."""
        return 0 < self.cores_per_node < self.devices_per_node

    @classmethod
    def of(cls, name: str, nodes: int = 1, devices_per_node: int = 8, *, within: str = "", between: str = "") -> Self:
        """A cluster of a well-known device: one of ``Cluster.names()``.

        >>> Cluster.of("h100", nodes=2, between="roce-200").between.name
        '200 Gb/s per device, RoCE'

        Args:
            name: of the device.
            nodes: the number of nodes.
            devices_per_node: the number of devices of each node (72 for a rack of GB200).
            within: the link inside a node, one of ``LINKS``; the usual link of the device if empty.
            between: the link between nodes, likewise.

        Raises:
            MeshError: a name is unknown, or a count is below 1.
        """
        key = _ALIASES.get(name.lower(), name.lower())
        if key not in DEVICES:
            raise MeshError(
                f"no numbers are known for a device called {name!r}; known devices are {', '.join(cls.names())}. "
                "Describe others: Cluster(Device(...), devices_per_node, num_nodes, Link(...), Link(...))"
            )
        device, usual_within, usual_between = DEVICES[key]
        return cls(device, devices_per_node, nodes, _link(within or usual_within), _link(between or usual_between))

    @staticmethod
    def names() -> tuple[str, ...]:
        """The names of devices that `Cluster.of` accepts."""
        return tuple(sorted([*DEVICES, *_ALIASES]))

    @classmethod
    def from_mesh(cls, mesh: Any, devices_per_node: int | None = None, device_name: str | None = None) -> Self:
        """The cluster that a `torch.distributed.DeviceMesh` spans.

        A device without a preset gets the memory that its driver reports, and an A100's speed until it is measured.

        Args:
            mesh: needs ``size()`` and ``device_type`` only; consecutive ranks are assumed to be in the same node.
            devices_per_node: by default the number of devices of this machine; for CPU processes the size of the mesh.
            device_name: by default the name that the driver reports.

        Raises:
            MeshError: the mesh is empty, torch sees no such device here, there is neither a preset nor a driver that
                tells the device's memory, or the mesh's size is not a multiple of a node's devices.
        """
        world, kind = int(mesh.size()), str(mesh.device_type)
        if world < 1:
            raise MeshError("the mesh holds no device")
        if kind == "cpu":
            return cls._of_cpu(world, devices_per_node or world)
        name = str(_driver_of(kind).get_device_name()) if device_name is None else device_name
        per_node = min(world, int(_driver_of(kind).device_count())) if devices_per_node is None else devices_per_node
        num_nodes, preset = _num_nodes(world, per_node), _preset_of(name)
        if preset:
            return cls.of(preset, num_nodes, per_node)
        device = unknown_device(name, _memory_of(name, kind))
        return cls(device, per_node, num_nodes, LINKS["nvlink3"], LINKS["infiniband-200"])

    @classmethod
    def _of_cpu(cls, world: int, per_node: int) -> Self:
        plain = cls.of("cpu", _num_nodes(world, per_node), per_node)
        source = "published: the operating system's physical memory, shared by the node's processes"
        sources = {**plain.device.sources, "memory_bytes": source, "host_memory_bytes": source}
        memory_bytes = _physical_memory_bytes() / per_node
        device = replace(plain.device, memory_bytes=memory_bytes, host_memory_bytes=memory_bytes, sources=sources)
        return replace(plain, device=device, cores_per_node=os.cpu_count() or 0)

    def has(self, device_name: str) -> bool:
        """Whether its devices are those whose driver reports `device_name` ("cpu" for a CPU)."""
        preset = _preset_of(device_name)
        return device_name == self.device.name or (bool(preset) and DEVICES[preset][0].name == self.device.name)

    def save(self, path: str | Path) -> None:
        """Write the cluster as readable JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            MeshError: the file can't be read, or holds no cluster.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a path
            raise MeshError(
                f"the cluster file {str(path)!r} can't be read: {error}. Name a file that Cluster.save wrote"
            ) from error
        return cls.from_json(text)

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
            data = cast(dict[str, Any], read_json(text))
            if data.pop("autopar_cluster") != 1:
                raise ValueError("autopar_cluster is not 1")
            check_fields(cls, data, "cluster", is_whole=False)
            data |= {"device": _read_part(Device, data, "device")}
            data |= {name: _read_part(Link, data, name) for name in ("within", "between")}
            return cls(**data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            names = ", ".join(part.name for part in fields(cls))
            raise MeshError(
                f"this is not the JSON of a cluster ({type(error).__name__}: {error}); it needs "
                f"autopar_cluster=1 and {names}, as Cluster.save writes them"
            ) from error


def _read_part(kind: type[T], data: dict[str, Any], name: str) -> T:
    check_fields(kind, data[name], name, is_whole=False)
    return kind(**data[name])


def _link(name: str) -> Link:
    if name not in LINKS:
        raise MeshError(f"no numbers are known for a link called {name!r}; known links are {', '.join(sorted(LINKS))}")
    return LINKS[name]


def _num_nodes(world: int, per_node: int) -> int:
    if world % per_node:
        raise MeshError(
            f"a mesh of {world} devices is not a multiple of the {per_node} devices of a node; pass devices_per_node"
        )
    return world // per_node


def _preset_of(driver_name: str) -> str:
    """The name in `DEVICES` for a driver's device name such as ``NVIDIA H100 80GB HBM3``; "" if there is none."""
    text = driver_name.lower()
    if "a100" in text:
        return "a100-40gb" if "40gb" in text else "a100-80gb"
    for name in ("h100", "h200", "gb200", "gb300", "b200", "mi300x", "mi325x"):
        if name in text and "g" + name not in text:
            return name
    for part, name in (("ascend910b", "ascend-910b"), ("gaudi3", "gaudi3"), ("trainium2", "trainium2")):
        if part in re.sub(r"[\s_-]", "", text):
            return name
    return ""


def _driver_of(kind: str) -> Any:
    """torch's module for such devices: ``torch.cuda``, ``torch.npu``, ..."""
    driver = getattr(sys.modules.get("torch"), kind, None)
    if driver is None or not driver.is_available():
        raise MeshError(
            f"the mesh is of {kind!r} devices, but torch sees none on this machine: use a 'cpu' mesh, or "
            "describe the devices of the training machine, such as Cluster.of('h100', nodes=2)"
        )
    return driver


def _memory_of(name: str, kind: str) -> float:
    """What the driver says of the memory of its current device."""
    memory = 0
    with suppress(MeshError, AttributeError):
        driver = _driver_of(kind)
        memory = driver.get_device_properties(driver.current_device()).total_memory
    if not memory:
        raise MeshError(
            f"no numbers are known for the device {name!r}, nor does its driver here tell its memory; known are "
            f"{', '.join(Cluster.names())}. Pass a Cluster instead of a mesh: Cluster(Device(...), devices_per_node, "
            "num_nodes, Link(...), Link(...))"
        )
    return float(memory)


def _physical_memory_bytes() -> float:
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, float(text)) if text.isdigit() else total
