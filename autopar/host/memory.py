"""The memory of this process's host."""

from __future__ import annotations

import math
from pathlib import Path

__all__ = ["available_bytes"]

_LINUX = Path("/proc/meminfo")


def available_bytes() -> float:
    """How much may still be taken without swapping, as Linux estimates it; infinite where a system doesn't say."""
    lines = _LINUX.read_text().splitlines() if _LINUX.exists() else []
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return float(sizes[0]) * 1024 if sizes else math.inf
