"""Identifies this machine, and the file of its profile."""

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
"""The folder in which ``python -m autopar.profile`` saves this machine's profile, and `parallelize` looks for it."""


def device_name(device: torch.device) -> str:
    """The device's name as its driver reports it; ``"cpu"`` for a CPU."""
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def describe_software(device: torch.device) -> dict[str, str]:
    """Versions and settings that measurements depend on."""
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
    """The path of the profile for `world_size` processes on machines like this one; the file need not exist."""
    machine = (platform.node(), device_name(device), *sorted(describe_software(device).items()), world_size)
    digest = hashlib.sha256(repr(machine).encode()).hexdigest()[:16]
    return Path(cache_dir).expanduser() / f"profile-{device.type}-{world_size}-{digest}.json"


def _nccl_version() -> str:
    untyped: Any = nccl
    return ".".join(map(str, untyped.version())) if torch.distributed.is_nccl_available() else ""
