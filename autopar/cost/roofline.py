"""The roofline of a device, and the part of its peak that a kernel reaches depending on its shape.

`ClusterPrices` prices ops with it, and `closed_forms` prints the same formula with symbols.

``seconds = kernels * launch + max(flops / rate, reads / bandwidth) + writes / bandwidth``: the result is written after
the last product of each tile, which is why products with a short inner dimension stay below the peak.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.cluster import Device
from autopar.errors import MissingPriceError
from autopar.ops import Work

__all__ = ["Roofline", "attention_efficiency", "flops_rate", "product_efficiency"]


_ALIGNED = {64: 1.0, 8: 0.75, 1: 0.5}
"""`Work.alignment` -> the fraction of the rate of products that it allows: rows of 128 bytes fill a line of the cache,
rows of 16 bytes can be loaded by one instruction.  Published: a hidden size of 14400 on 8 devices (rows of 1800
elements) runs 27 % slower than 13824 (rows of 1728; BigScience's chronicles of its 176B model).  Estimate: below 8
elements."""

_ATTENTION_POWER = 0.85
"""The power of attention relative to that of products: attention slows down only on devices that sustain less than this
fraction of the rate of products."""


def product_efficiency(device: Device, work: Work) -> float:
    """The fraction of the peak that the inner loop of a matrix product reaches under sustained load.

    Alignment of rows matters only on devices with matrix units, which make 16 bits much faster than 32.
    """
    rates = device.flops_per_s
    has_units = rates.get(work.dtype, 0.0) > 2 * rates.get("float32", rates.get(work.dtype, 0.0))
    return device.matmul_efficiency * device.sustained_fraction * (_ALIGNED[work.alignment] if has_units else 1.0)


def attention_efficiency(device: Device, work: Work) -> float:
    """The fraction of the peak that fused attention reaches at this length and head size.

    Kernels written for the device's generation (`Work.is_new_kernel`) have a best rate of their own where it is known.
    """
    is_new = work.is_new_kernel and device.new_attention_efficiency > 0
    best = device.new_attention_efficiency if is_new else device.attention_efficiency
    return best * _fraction(work) * min(1.0, device.sustained_fraction / _ATTENTION_POWER)


def _fraction(work: Work) -> float:
    """The fraction of its best rate that fused attention reaches.

    ``length / (length + 540)`` for causal, ``length / (length + 200)`` for full attention, times 0.87 for heads
    smaller than 128 and further in proportion below 64: fitted within 6 % to the published sweeps over lengths 512 to
    16384 on two generations of devices (FlashAttention-2, figures 4 and 7: HW-0324 to HW-0395).
    """
    half_length = 540 if work.is_causal else 200
    head = 1.0 if work.head_dim >= 128 else 0.87 * min(1.0, work.head_dim / 64)
    return max(head, 0.05) * work.length / (work.length + half_length)


_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The dtype of the real and the imaginary part."""


def flops_rate(device: Device, work: Work) -> float:
    """The rate of `device` for this work, in FLOP/s.

    A complex multiplication and addition, which `Work` counts as two FLOPs, is four real ones of each: without a rate
    for its dtype it runs at a quarter of the rate of real numbers.

    Raises:
        MissingPriceError: the device has no rate for its dtype.
    """
    peak = device.flops_per_s.get(work.dtype)
    if peak is None and work.dtype in _PARTS:
        peak = device.flops_per_s.get(_PARTS[work.dtype], 0.0) / 4 or None
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
    """The roofline of a device.

    Args:
        device: the device.
        launch_s: the overhead of a kernel.
        bytes_per_s: the rate of memory that kernels reach.
        larger: the maximum of two quantities: ``max``, or a function for quantities that aren't numbers.
    """

    device: Device
    launch_s: float
    bytes_per_s: float
    larger: Callable[[Any, Any], Any] = max

    @classmethod
    def of(cls, device: Device) -> Roofline:
        """The roofline with a device's numbers."""
        return cls(device, device.launch_s, device.memory_bytes_per_s * device.memory_efficiency)

    def seconds(self, work: Work) -> tuple[float, float]:
        """The seconds of forward and of backward.

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
        read_s = read_bytes / self.bytes_per_s
        return num_kernels * self.launch_s + self.larger(compute_s, read_s) + write_bytes / self.bytes_per_s
