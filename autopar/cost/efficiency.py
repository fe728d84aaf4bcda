"""Which part of a device's peak a kernel reaches, as a function of its shape."""

from __future__ import annotations

from autopar.cluster import Device
from autopar.ops import Work

__all__ = ["attention_efficiency", "product_efficiency"]

_ALIGNED = {64: 1.0, 8: 0.75, 1: 0.5}
"""Part of the rate of a product by `Work.alignment`: rows of 128 bytes fill a line of the cache, rows of 16 bytes can
be loaded by one instruction.  Published: a hidden size of 14400 on 8 devices (rows of 1800 elements) runs 27 % slower
than 13824 (rows of 1728; BigScience's chronicles of its 176B model).  Estimate: below 8 elements."""

_ATTENTION_POWER = 0.85
"""What attention draws of the power of products: only a device that slows products down further slows it, too."""


def product_efficiency(device: Device, work: Work) -> float:
    """The part of the peak that the inner loop of a matrix product reaches under load that lasts.

    Only matrix units, which are what makes 16 bits much faster than 32, need aligned rows.
    """
    rates = device.flops_per_s
    has_units = rates[work.dtype] > 2 * rates.get("float32", rates[work.dtype])
    return device.matmul_efficiency * device.sustained_fraction * (_ALIGNED[work.alignment] if has_units else 1.0)


def attention_efficiency(device: Device, work: Work) -> float:
    """The part of the peak that fused attention reaches at this length and head size.

    Kernels of the device's own generation (`Work.is_new_kernel`) have their own best rate where it is known.
    """
    is_new = work.is_new_kernel and device.new_attention_efficiency > 0
    best = device.new_attention_efficiency if is_new else device.attention_efficiency
    return best * _fraction(work) * min(1.0, device.sustained_fraction / _ATTENTION_POWER)


def _fraction(work: Work) -> float:
    """Which part of its best rate fused attention reaches.

    ``length / (length + 540)`` for causal, ``length / (length + 200)`` for full attention, times 0.87 for heads
    smaller than 128 and further in proportion below 64: fitted within 6 % to the published sweeps over lengths 512 to
    16384 on two generations of devices (FlashAttention-2, figures 4 and 7: HW-0324 to HW-0395).
    """
    lost = 540 if work.is_causal else 200
    head = 1.0 if work.head_dim >= 128 else 0.87 * min(1.0, work.head_dim / 64)
    return max(head, 0.05) * work.length / (work.length + lost)
