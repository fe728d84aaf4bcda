"""What tensors without a device are on where a script has said so with ``torch.set_default_device``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_host_tensor", "on_host"]


@contextmanager
def on_host() -> Generator[None]:
    """Inside, tensors that are made without a device are on the host, as tracing, planning and proofs expect.

    Where nothing else is said they are there anyway, and torch functions are not intercepted.
    """
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield


def as_host_tensor(x: Any) -> Tensor:
    """A tensor as it is, on its device; anything else as a new tensor on the host."""
    return x if isinstance(x, Tensor) else torch.as_tensor(x, device="cpu")
