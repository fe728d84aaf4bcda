"""Copies between a device and its host's memory, where parameters may be stored (`Decisions.host_storage`).

The module's parameters are then DTensors whose local parts are in the host's memory, pinned if the device copies by
itself.  The user's optimizer updates them there (`host_threads`).  What layers compute with is copied to the device
when it is unsharded, and gradients are copied back once they are final.  On an accelerator copies run on a stream of
their own, while the device computes; on a CPU the same code copies from one allocation to another.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from autopar.host.accelerators import pins_memory
from autopar.lower.parameters.host_threads import widen_host_steps

__all__ = ["HostCopies"]

_HOST = torch.device("cpu")


class HostCopies:
    """Copies to `device` and from there."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is copied yet."""
        self.device = device
        self._stream = _copy_stream(device) if device.type != "cpu" else None
        if device.type != "cpu":
            widen_host_steps()

    def home(self, x: Tensor) -> Tensor:
        """A copy of `x` in the host's memory, made when this returns."""
        return self.room(x).copy_(x)

    def send(self, xs: Iterable[Tensor]) -> list[Tensor]:
        """Start to copy these to the host; the copies are made behind `finish`."""
        with self.on_stream():
            return [self._send(x) for x in xs]

    def bring(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Copy these to the device, on the stream of `on_stream`."""
        return [torch.empty_like(x, device=self.device).copy_(x, non_blocking=True) for x in xs]

    def room(self, x: Tensor) -> Tensor:
        """Room in the host's memory for a copy of `x`, pinned if it can be."""
        return torch.empty_like(x, device=_HOST, pin_memory=pins_memory(self.device.type))

    def on_stream(self) -> AbstractContextManager[object]:
        """Inside, what the device does runs after all that was computed so far, and concurrently with what follows.

        So memory that is made inside and freed outside is used again only behind what has read it outside.
        """
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        return _current(self._stream)

    def join(self) -> None:
        """What is computed from now on runs behind the copies so far."""
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)

    def finish(self) -> None:
        """Wait until all copies are made: the host may read what came, and change what was copied."""
        if self._stream is not None:
            self._stream.synchronize()

    def _send(self, x: Tensor) -> Tensor:
        made = self.room(x).copy_(x, non_blocking=True)
        if self._stream is not None:
            x.record_stream(self._stream)  # it may be freed before the copy is made
        return made


@contextmanager
def _current(stream: torch.Stream) -> Generator[None]:
    """Inside, `stream` is its device's current one; may be nested, which a stream's own context may not."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """The stream of copies between this device and the host."""
    return torch.Stream(device)
