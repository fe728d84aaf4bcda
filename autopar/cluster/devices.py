"""Devices known by name, with the links that they usually have."""

from __future__ import annotations

from dataclasses import fields, replace

from autopar.cluster.hardware import Device

__all__ = ["DEVICES", "unknown_device"]

_GIB = 2.0**30
_TFLOPS = 1e12
_SHEET = "published: the vendor's data sheet, dense"
_REPORTED = "published: the size that the driver reports to programs"
_CALIBRATED = "calibrated: published training runs, see docs/accuracy.md"
_HOST = "published: host memory of the vendor's system of 8 devices"
_PCIE5 = "published: PCIe 5.0 x16, 63 GB/s one way (PCI-SIG); estimate: 0.8 of it, with packet headers, pinned memory"
_RESERVED = "estimate: context 0.5 GB, communicator buffers and library workspaces 2 GB"


def _gpu_sources(matmul: str, attention: str, copy: str, new_attention: str = "") -> dict[str, str]:
    return {
        "memory_bytes": _REPORTED,
        "memory_bytes_per_s": _SHEET,
        "flops_per_s": _SHEET,
        "matmul_efficiency": matmul,
        "attention_efficiency": attention,
        "memory_efficiency": copy,
        "sustained_fraction": _CALIBRATED,
        "new_attention_efficiency": new_attention,
        "launch_s": "estimate: gap between dependent kernels of an eager program that keeps its queue full",
        "reserved_memory_bytes": _RESERVED,
        "usable_memory_fraction": "estimate: 6 % for fragmentation",
        "host_bytes_per_s": _PCIE5,
        "host_memory_bytes": f"{_HOST}, 2 TB",
    }


def _a100(gib: float, bytes_per_s: float) -> Device:
    return Device(
        name=f"A100-{'40GB' if gib < 50 else '80GB'}",
        memory_bytes=gib * _GIB,
        memory_bytes_per_s=bytes_per_s,
        flops_per_s={
            "bfloat16": 312 * _TFLOPS, "float16": 312 * _TFLOPS,
            "float32": 19.5 * _TFLOPS, "float64": 19.5 * _TFLOPS,
        },
        matmul_efficiency=0.84,
        attention_efficiency=0.63,
        memory_efficiency=0.775,
        launch_s=4e-6,
        sustained_fraction=0.85,
        reserved_memory_bytes=2.5e9,
        host_bytes_per_s=12.5e9,
        host_memory_bytes=(1 if gib < 50 else 2) * 1e12 / 8,
        sources=_gpu_sources(
            "published: best shape 271.2 of 312 TFLOP/s (HW-0255), 0.90 without writing the result; "
            "estimate: 0.84 over usual shapes",
            "published: 195 of 312 TFLOP/s as the sequence grows, head dim 128, causal (FlashAttention-2, "
            "figure 4)",
            "published: a copy moves 1581.5 GB/s (HW-0251)",
        )
        | {
            "host_bytes_per_s": "published: PCIe 4.0 x16, 31.5 GB/s one way (PCI-SIG), the uplink of two devices in "
            "the vendor's system; estimate: 0.8 of half",
            "host_memory_bytes": f"{_HOST}, 1 TB (40 GB devices) or 2 TB",
        },
    )  # fmt: skip


_H_FLOPS = {
    "bfloat16": 989 * _TFLOPS, "float16": 989 * _TFLOPS, "float32": 67 * _TFLOPS, "float64": 67 * _TFLOPS,
    "float8_e4m3fn": 1979 * _TFLOPS, "float8_e5m2": 1979 * _TFLOPS,
}  # fmt: skip
_PCIE5_BYTES_PER_S = 50e9
_HOST_BYTES = 2e12 / 8
_H_MATMUL = (
    "published: best shape 794.5 of 989 TFLOP/s (HW-0258), 0.82 without the time to write the result; "
    "estimate: 0.76 over usual shapes"
)
_H_ATTENTION = "published: 335 of 989 TFLOP/s as the sequence grows, head dim 128, causal (FlashAttention-2, figure 7)"
_H_NEW_ATTENTION = (
    "published: 595 to 617 of 989 TFLOP/s forward, cuDNN, head dim 128 (FlashAttention-3, arXiv:2407.08608, figure 5); "
    "estimate: 0.55 with the backward"
)

_H100 = Device(
    name="H100-80GB",
    memory_bytes=79.1 * _GIB,
    memory_bytes_per_s=3.35e12,
    flops_per_s=_H_FLOPS,
    matmul_efficiency=0.76,
    attention_efficiency=0.34,
    memory_efficiency=0.75,
    launch_s=4e-6,
    sustained_fraction=0.85,
    reserved_memory_bytes=2.5e9,
    new_attention_efficiency=0.55,
    host_bytes_per_s=_PCIE5_BYTES_PER_S,
    host_memory_bytes=_HOST_BYTES,
    sources=_gpu_sources(_H_MATMUL, _H_ATTENTION, "published: a copy moves 2520 GB/s (HW-0252)", _H_NEW_ATTENTION),
)
_H200 = Device(
    name="H200-141GB",
    memory_bytes=139.8 * _GIB,
    memory_bytes_per_s=4.8e12,
    flops_per_s=_H_FLOPS,
    matmul_efficiency=0.76,
    attention_efficiency=0.34,
    memory_efficiency=0.75,
    launch_s=4e-6,
    sustained_fraction=0.85,
    reserved_memory_bytes=2.5e9,
    new_attention_efficiency=0.55,
    host_bytes_per_s=_PCIE5_BYTES_PER_S,
    host_memory_bytes=_HOST_BYTES,
    sources=_gpu_sources(_H_MATMUL, _H_ATTENTION, "estimate: as H100", _H_NEW_ATTENTION),
)
_H100_500W = replace(
    _H100,
    name="H100-96GB-500W",
    memory_bytes=94.5 * _GIB,
    memory_bytes_per_s=2.4e12,
    sustained_fraction=0.85 * 500 / 700,
    sources={
        **_H100.sources,
        "memory_bytes_per_s": "published: torchtitan's performance document, HBM2e at 2.4 TB/s",
        "sustained_fraction": "calibrated: that of the H100 in proportion to the power, 500 of 700 W",
    },
)
_B200 = Device(
    name="B200-180GB",
    memory_bytes=178.3 * _GIB,
    memory_bytes_per_s=8.0e12,
    flops_per_s={
        "bfloat16": 2250 * _TFLOPS, "float16": 2250 * _TFLOPS,
        "float32": 75 * _TFLOPS, "float64": 37 * _TFLOPS,
        "float8_e4m3fn": 4500 * _TFLOPS, "float8_e5m2": 4500 * _TFLOPS, "float4_e2m1fn_x2": 9000 * _TFLOPS,
    },
    matmul_efficiency=0.78,
    attention_efficiency=0.15,
    new_attention_efficiency=0.5,
    memory_efficiency=0.725,
    launch_s=4e-6,
    sustained_fraction=0.7,
    reserved_memory_bytes=3e9,
    host_bytes_per_s=_PCIE5_BYTES_PER_S,
    host_memory_bytes=_HOST_BYTES,
    sources=_gpu_sources(
        "published: best shape 1745 of 2250 TFLOP/s (HW-0260); 0.84 without writing the result; "
        "estimate: 0.78 over usual shapes",
        "estimate: FlashAttention-2's instructions run as fast as on an H100, 335 TFLOP/s",
        "published: a copy on a GB200 moves 5800 GB/s (HW-0253)",
        "estimate: as large a part of the peak as on an H100, less 10 %",
    ),
)  # fmt: skip
_GB200 = replace(
    _B200,
    name="GB200-186GB",
    sustained_fraction=0.7,
    memory_bytes=184.0 * _GIB,
    flops_per_s={
        "bfloat16": 2500 * _TFLOPS, "float16": 2500 * _TFLOPS,
        "float32": 80 * _TFLOPS, "float64": 40 * _TFLOPS,
        "float8_e4m3fn": 5000 * _TFLOPS, "float8_e5m2": 5000 * _TFLOPS, "float4_e2m1fn_x2": 10000 * _TFLOPS,
    },
    matmul_efficiency=0.76,
    host_bytes_per_s=180e9,
    host_memory_bytes=480e9 / 2,
    sources={
        **_B200.sources,
        "host_bytes_per_s": "published: NVLink-C2C, 450 GB/s one way for the two devices of a superchip (vendor's data "
        "sheet); estimate: 0.8 of half",
        "host_memory_bytes": "published: 480 GB for the two devices of a superchip (vendor's data sheet)",
        "matmul_efficiency": "published: best shape 1822 of 2500 TFLOP/s (HW-0262), 0.80 without writing the result; "
        "estimate: 0.76 over usual shapes",
    },
)  # fmt: skip
_GB300 = replace(
    _GB200,
    name="GB300-288GB",
    sustained_fraction=0.9,
    memory_bytes=277.0 * _GIB,
    flops_per_s={**_GB200.flops_per_s, "float4_e2m1fn_x2": 15000 * _TFLOPS},
)
_MI300X = Device(
    name="MI300X-192GB",
    memory_bytes=191.5 * _GIB,
    memory_bytes_per_s=5.3e12,
    flops_per_s={
        "bfloat16": 1307 * _TFLOPS, "float16": 1307 * _TFLOPS,
        "float32": 163 * _TFLOPS, "float64": 163 * _TFLOPS,
        "float8_e4m3fn": 2614 * _TFLOPS, "float8_e5m2": 2614 * _TFLOPS,
    },
    matmul_efficiency=0.48,
    attention_efficiency=0.15,
    memory_efficiency=0.70,
    launch_s=6e-6,
    sustained_fraction=0.7,
    reserved_memory_bytes=3e9,
    host_bytes_per_s=_PCIE5_BYTES_PER_S,
    host_memory_bytes=_HOST_BYTES,
    sources=_gpu_sources(
        "published: best shape 668.4 TFLOP/s (HW-0265); estimate: 0.48 over usual shapes",
        "calibrated: 200 TFLOP/s, together with sustained_fraction (3 rows)",
        "estimate: as A100, less 10 %",
    ),
)  # fmt: skip
_MI325X = replace(
    _MI300X,
    name="MI325X-256GB",
    memory_bytes=255.5 * _GIB,
    memory_bytes_per_s=6.0e12,
    sources={
        **_MI300X.sources,
        "memory_bytes": "published: 256 GB (awesomeagents.ai/hardware/amd-mi325x), less what an MI300X reserves",
        "memory_bytes_per_s": "published: 6 TB/s (the same page)",
    },
)
_AS_H100 = "estimate: as an H100; no published measurement was consulted"


def _from_sheets(name: str, gib: float, bytes_per_s: float, tflops: dict[str, float], sheet: str) -> Device:
    """A device of which only peaks are published.

    Everything else is taken from an H100, without the efficiency of kernels written for that generation.
    """
    peaks = f"published: {sheet}"
    return replace(
        _H100,
        name=name,
        memory_bytes=gib * _GIB,
        memory_bytes_per_s=bytes_per_s,
        flops_per_s={dtype: rate * _TFLOPS for dtype, rate in tflops.items()},
        new_attention_efficiency=0.0,
        sources=dict.fromkeys(_H100.sources, _AS_H100)
        | {"memory_bytes": peaks, "memory_bytes_per_s": peaks, "flops_per_s": peaks, "new_attention_efficiency": ""},
    )


def unknown_device(name: str, memory_bytes: float) -> Device:
    """A device of which nothing is known but its name and its memory: all else is taken from an A100.

    A plan for it needs measured prices; without, seconds are guesses.
    """
    guess = "estimate: as an A100, since nothing is known of this device"
    made = replace(_a100(79.2, 2.039e12), name=name, memory_bytes=memory_bytes)
    seen = {"memory_bytes": "published: what the driver reports to programs"}
    return replace(made, sources=dict.fromkeys(made.sources, guess) | seen)


_ASCEND_910B = _from_sheets(
    "Ascend-910B-64GB", 61, 1.6e12, {"bfloat16": 280, "float16": 280, "float32": 75, "float64": 1},
    "a cloud's description of the 910B (280 TFLOP/s in 16 bits, 64 GB; ai.gitee.com/docs/compute); estimate: 1.6 TB/s, "
    "75 TFLOP/s in 32 bits and hardly any in 64, as the vendor publishes no data sheet",
)  # fmt: skip
_GAUDI3 = _from_sheets(
    "Gaudi3-128GB", 118, 3.67e12, {
        "bfloat16": 1835, "float16": 459, "float32": 229, "float64": 1, "float8_e4m3fn": 1835, "float8_e5m2": 1835,
    },
    "the vendor's talk at Hot Chips 2024 (1835 TFLOP/s in bfloat16 and 8 bits, 128 GB at 3.67 TB/s); estimate: a "
    "quarter of it in float16, an eighth in float32, hardly any in float64",
)  # fmt: skip
_TRAINIUM2 = _from_sheets(
    "Trainium2-96GB", 96, 2.9e12, {
        "bfloat16": 667, "float16": 667, "float32": 181, "float64": 1, "float8_e4m3fn": 1299, "float8_e5m2": 1299,
    },
    "the vendor's architecture page of the chip (eight cores together; 96 GiB at 2.9 TB/s); estimate: hardly any in "
    "float64",
)  # fmt: skip
_CPU = Device(
    name="cpu",
    memory_bytes=8e9,
    memory_bytes_per_s=10e9,
    flops_per_s={
        "float32": 50e9, "float64": 25e9, "bfloat16": 12e9, "float16": 6e9, "int64": 1e9, "int32": 1e9,
        "complex64": 10e9, "complex128": 5e9,
    },
    matmul_efficiency=0.8,
    attention_efficiency=0.4,
    memory_efficiency=0.7,
    launch_s=5e-6,
    reserved_memory_bytes=0.4e9,
    usable_memory_fraction=0.9,
    host_bytes_per_s=3.5e9,
    host_memory_bytes=8e9,
    sources={field.name: "estimate: one core of a usual server; measure_profile measures the real one"
             for field in fields(Device) if field.name not in ("name", "sources")},
)  # fmt: skip

DEVICES: dict[str, tuple[Device, str, str]] = {
    "a100-40gb": (_a100(39.4, 1.555e12), "nvlink3", "infiniband-200"),
    "a100-80gb": (_a100(79.2, 2.039e12), "nvlink3", "infiniband-200"),
    "h100": (_H100, "nvlink4", "infiniband-400"),
    "h100-500w": (_H100_500W, "nvlink4", "infiniband-400"),
    "h200": (_H200, "nvlink4", "infiniband-400"),
    "b200": (_B200, "nvlink5", "efa-400"),
    "gb200": (_GB200, "nvlink5", "infiniband-400"),
    "gb300": (_GB300, "nvlink5", "infiniband-400"),
    "mi300x": (_MI300X, "infinity-fabric", "infiniband-400"),
    "mi325x": (_MI325X, "infinity-fabric", "infiniband-400"),
    "ascend-910b": (_ASCEND_910B, "hccs", "roce-200"),
    "gaudi3": (_GAUDI3, "gaudi3-roce", "roce-600"),
    "trainium2": (_TRAINIUM2, "neuronlink3", "efa-200"),
    "cpu": (_CPU, "loopback", "loopback"),
}
"""Name -> the device and its usual links inside a node and between nodes (names of `autopar.cluster.links.LINKS`)."""
