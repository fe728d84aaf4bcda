"""What not every accelerator can do: time its own events, pin the host's memory, count what is allocated.

Devices that torch knows itself, and the large plug-ins (Ascend's), can do all of it.  Where one can't, seconds are the
host's, host memory is not pinned, and no bytes are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["DeviceClock", "peak_bytes", "pins_memory", "reset_peak_bytes", "times_events"]

_REFUSALS = (RuntimeError, NotImplementedError)  # what torch raises where a backend lacks a function


class DeviceClock:
    """Seconds since it was made, as a device passes them.

    With timed events a moment is where the current stream stands; nothing waits for it.  Without, it is where the host
    stands once the device has done all that was asked of it, so that nothing overlaps while the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        """It begins now."""
        self._device = device
        self._began_s = time.perf_counter()
        self._first = self._record() if times_events(device.type) else None

    def now(self) -> Callable[[], float]:
        """This moment in seconds: call the result when the device has come to it."""
        first = self._first
        if first is not None:
            event = self._record()
            return lambda: first.elapsed_time(event) / 1e3
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        now_s = time.perf_counter() - self._began_s
        return lambda: now_s

    def finished_s(self) -> float:
        """Seconds until the device has done all that was asked of it, as the host sees them."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter() - self._began_s

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


@cache
def times_events(device_type: str) -> bool:
    """Whether events on devices of this type tell the seconds between them; never on a CPU."""
    if device_type == "cpu":
        return False
    try:
        events = [torch.Event(device_type, enable_timing=True) for _ in range(2)]
        for event in events:
            event.record()
        events[1].synchronize()
        events[0].elapsed_time(events[1])
    except _REFUSALS:
        return False
    return True


@cache
def pins_memory(device_type: str) -> bool:
    """Whether the host's memory can be pinned for copies to and from devices of this type."""
    if device_type == "cpu":
        return False
    try:
        torch.empty(1, pin_memory=True, device="cpu")
    except _REFUSALS:
        return False
    return True


def reset_peak_bytes(device: torch.device) -> None:
    """Begin to count anew, where allocated bytes are counted."""
    reset: Any = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def peak_bytes(device: torch.device) -> float:
    """The most bytes that were allocated at a time since `reset_peak_bytes`; 0 where nobody counts them."""
    peak: Any = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    return 0.0 if peak is None else float(peak(device))
