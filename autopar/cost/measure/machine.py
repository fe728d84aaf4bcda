"""Which machine this is, and where its profile is kept."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

__all__ = ["CACHE_DIR", "describe_software", "device_name", "profile_path"]

CACHE_DIR = Path("~/.cache/autopar").expanduser()
"""Where `parallelize` looks for this machine's profile, and ``python -m autopar.profile`` puts it."""


def device_name(device: torch.device) -> str:
    """The device's own name for itself; ``"cpu"`` for a CPU."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def describe_software(device: torch.device) -> dict[str, str]:
    """Versions and settings that the numbers depend on."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        return {**versions, "cuda": str(torch.version.cuda), "nccl": _nccl_version()}
    if device.type != "cpu":
        return {**versions, "accelerator": device.type}
    return {
        **versions,
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "processor": platform.processor() or platform.machine(),
    }


def profile_path(cache_dir: str | Path, device: torch.device, world_size: int) -> Path:
    """The file of what `world_size` processes like this one have measured; there need not be one yet."""
    machine = (platform.node(), device_name(device), *sorted(describe_software(device).items()), world_size)
    digest = hashlib.sha256(repr(machine).encode()).hexdigest()[:16]
    return Path(cache_dir).expanduser() / f"profile-{device.type}-{world_size}-{digest}.json"


def _nccl_version() -> str:
    untyped: Any = nccl
    return ".".join(map(str, untyped.version())) if torch.distributed.is_nccl_available() else ""
