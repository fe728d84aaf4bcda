"""The roofline, one formula for numbers and symbols: what `ClusterPrices` asks, and what `closed_forms` shows.

``seconds = kernels * launch + max(flops / rate, reads / bandwidth) + writes / bandwidth``: the result is written after
the last product of each tile, which is why products with a short inner dimension stay below the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.cluster import Device
from autopar.cost.efficiency import attention_efficiency, product_efficiency
from autopar.errors import MissingPriceError
from autopar.ops import Work

__all__ = ["Roofline", "flops_rate"]


def flops_rate(device: Device, work: Work) -> float:
    """Flops per second at which `device` does this work.

    Raises:
        MissingPriceError: the device has no rate for its dtype.
    """
    peak = device.flops_per_s.get(work.dtype)
    if peak is None:
        raise MissingPriceError(
            f"{device.name} has no rate in {work.dtype}, only in {', '.join(device.flops_per_s)}: "
            "add it to Device.flops_per_s"
        )
    if work.kind == "attention":
        return peak * attention_efficiency(device, work)
    return peak * product_efficiency(device, work)


@dataclass(frozen=True)
class Roofline:
    """The roofline of a device.  `launch_s` is in seconds, `bytes_per_s` what memory sustains; `larger` is max, or
    what stands for it where the quantities are no numbers.
    """

    device: Device
    launch_s: float
    bytes_per_s: float
    larger: Callable[[Any, Any], Any] = max

    @classmethod
    def of(cls, device: Device) -> Roofline:
        """The one of a device's own numbers."""
        return cls(device, device.launch_s, device.memory_bytes_per_s * device.memory_efficiency)

    def seconds(self, work: Work) -> tuple[float, float]:
        """Seconds forward and backward.

        Raises:
            MissingPriceError: the device has no rate for the work's dtype.
        """
        rate = flops_rate(self.device, work) if work.flops else math.inf
        forward_s = 0.0
        if work.kind != "view":
            forward_s = self._kernels_s(work.flops / rate, work.read_bytes, work.write_bytes, 1)
        return forward_s, self._kernels_s(
            work.backward_flops / rate, work.backward_read_bytes, work.backward_write_bytes, work.num_backward_kernels
        )

    def _kernels_s(self, compute_s: float, read_bytes: float, write_bytes: float, num_kernels: int) -> float:
        moving_s = read_bytes / self.bytes_per_s
        return num_kernels * self.launch_s + self.larger(compute_s, moving_s) + write_bytes / self.bytes_per_s
