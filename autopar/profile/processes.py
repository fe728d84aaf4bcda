"""The processes that measure: this one alone, or all those that torchrun started."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import ProfileError
from autopar.lower.communication.process_groups import ProcessGroupCommunicator

__all__ = ["choose_device", "is_first_here", "open_processes"]

_TIMEOUT = timedelta(minutes=5)

_dist: Any = dist  # torch.distributed doesn't export everything that it documents


def is_first_here() -> bool:
    """Whether this is the first process of its node, before there is a process group."""
    return _place_in_node() == 0


def choose_device(kind: str | None) -> torch.device:
    """Return this process's device: by default an accelerator if there is one.

    Raises:
        ProfileError: there is no such device for this process.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = kind or ("cpu" if accelerator is None else accelerator.type)
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        alternative = "" if accelerator is None else f"{accelerator.type} or "
        raise ProfileError(f"--device {kind}: PyTorch sees no such device here. Use --device {alternative}cpu")
    count, index = torch.accelerator.device_count(), _place_in_node()
    if index >= count:
        raise ProfileError(
            f"--device {kind}: process {index} of this node has no device, there are {count}. "
            f"Start {count} processes: torchrun --nproc-per-node {count} -m autopar.profile"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


@contextmanager
def open_processes(device: torch.device) -> Generator[ProcessGroupCommunicator | None]:
    """Yield the communicator of the existing process group, or of torchrun's processes; None for a single process."""
    if dist.is_initialized():
        yield ProcessGroupCommunicator(device=device)
        return
    if not dist.is_torchelastic_launched():
        yield None
        return
    dist.init_process_group(_dist.get_default_backend_for_device(device), timeout=_TIMEOUT)
    try:
        yield ProcessGroupCommunicator(device=device)
    finally:
        dist.destroy_process_group()


def _place_in_node() -> int:
    return _dist.get_node_local_rank(fallback_rank=0)
