"""Prices beside published measurements: every number is a row (HW-...) of the published hardware figures."""

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.placement import Axis
from tests.cost.ops import FLASH, LINEAR, tensor

MIB = 2**20

# Row, preset, nodes, kind, devices, MiB, measured seconds or (GB/s of bus bandwidth), tolerance.
COLLECTIVES = [
    ("HW-0010", "h100", 1, "all_reduce", 8, 0.5, 20.66e-6, 0.20),
    ("HW-0013", "h100", 1, "all_reduce", 8, 4, 54.19e-6, 0.12),
    ("HW-0016", "h100", 1, "all_reduce", 8, 32, 199.3e-6, 0.08),
    ("HW-0018", "h100", 1, "all_reduce", 8, 128, 586.4e-6, 0.08),
    ("HW-0021", "h100", 1, "all_reduce", 8, 1024, 4029.4e-6, 0.05),
    ("HW-0025", "h100", 1, "all_reduce", 8, 16384, 62648e-6, 0.03),
    ("HW-0126", "h200", 1, "all_reduce", 8, 64, 346.51, 0.05),
    ("HW-0195", "h200", 1, "all_reduce", 4, 8192, 363.3, 0.05),
    ("HW-0197", "h200", 1, "all_reduce", 5, 8192, 414.2, 0.16),
    ("HW-0217", "h200", 1, "all_gather", 8, 16384, 361.4, 0.03),
    ("HW-0218", "h200", 1, "reduce_scatter", 8, 16384, 362.9, 0.03),
    ("HW-0105", "a100", 1, "all_reduce", 8, 32, 424e-6, 0.10),
    ("HW-0112", "a100", 1, "all_reduce", 8, 4096, 32136e-6, 0.05),
    ("HW-0169", "b200", 1, "all_reduce", 8, 4096, 740.64, 0.10),
    ("HW-0170", "b200", 4, "all_reduce", 32, 4096, 377.34, 0.10),
    ("HW-0219", "mi300x", 1, "all_reduce", 2, 4096, 47.671, 0.10),
    ("HW-0220", "mi300x", 1, "all_reduce", 8, 4096, 312.912, 0.05),
    ("HW-0063", "h100", 2, "all_reduce", 16, 32, 439.7e-6, 0.10),
    ("HW-0065", "h100", 2, "all_reduce", 16, 128, 870.3e-6, 0.10),
    ("HW-0068", "h100", 2, "all_reduce", 16, 1024, 4607.6e-6, 0.05),
    ("HW-0075", "h100", 12, "all_reduce", 96, 2048, 11163e-6, 0.05),
    ("HW-0229", "h100", 32, "all_reduce", 256, 2048, 340.0, 0.12),
    ("HW-0228", "h100", 32, "all_gather", 256, 2048, 200.0, 0.25),
]


@pytest.mark.parametrize(("row", "name", "nodes", "kind", "size", "mib", "measured", "tolerance"), COLLECTIVES)
def test_collective(row, name, nodes, kind, size, mib, measured, tolerance):
    num_bytes = mib * MIB
    share = (2 if kind == "all_reduce" else 1) * (size - 1) / size
    measured_s = measured if measured < 1 else share * num_bytes / (measured * 1e9)
    priced_s = ClusterPrices(Cluster.of(name, nodes)).collective_s(kind, Axis(size, 1), num_bytes)
    assert priced_s == pytest.approx(measured_s, rel=tolerance)


@pytest.mark.parametrize(
    ("mib", "measured_s"), [(128, 3912.9e-6), (512, 13552e-6), (2048, 51406e-6)]
)  # HW-0043 to HW-0047: 4 NICs of 100 Gb/s for 8 devices; only bandwidth is told, so buffers are large
def test_a_slower_network_by_own_numbers(mib, measured_s):
    cluster = Cluster.of("a100", nodes=2)
    network = replace(cluster.between, all_reduce_bytes_per_s=50e9 / 8 * 0.82)
    prices = ClusterPrices(replace(cluster, between=network))
    assert prices.collective_s("all_reduce", Axis(16, 1), mib * MIB) == pytest.approx(measured_s, rel=0.25)


# Row, preset, dtype, rows, columns, inner, TFLOP/s.
# 2112 columns fill the last wave of tiles badly; the price knows no tiles.
PRODUCTS = [
    ("HW-0255", "a100", "bfloat16", 1024, 10240, 5120, 271.2),
    ("HW-0258", "h100", "bfloat16", 2048, 2048, 13312, 794.5),
    ("HW-0260", "b200", "bfloat16", 1792, 16128, 3072, 1745.0),
    ("HW-0265", "mi300x", "bfloat16", 10240, 15360, 8192, 668.4),
    ("HW-0273", "h100", "float8_e4m3fn", 1024, 9216, 14336, 1402.6),
    ("HW-0280", "h100", "float8_e4m3fn", 128, 2112, 7168, 352.0),
    ("HW-0286", "h100", "float8_e4m3fn", 4096, 2112, 7168, 1058.0),
    ("HW-0287", "h100", "float8_e4m3fn", 4096, 24576, 1536, 990.0),
    ("HW-0288", "h100", "float8_e4m3fn", 4096, 32768, 512, 590.0),
    ("HW-0289", "h100", "float8_e4m3fn", 4096, 7168, 16384, 1358.0),
    ("HW-0291", "h100", "float8_e4m3fn", 4096, 7168, 2048, 1025.0),
]


def _prices_of_short_runs(name):
    """Published products run for seconds, which doesn't heat a device up."""
    cluster = Cluster.of(name)
    return ClusterPrices(replace(cluster, device=replace(cluster.device, sustained_fraction=1.0)))


@pytest.mark.parametrize(("row", "name", "dtype", "rows", "columns", "inner", "tflops"), PRODUCTS)
def test_matrix_product(row, name, dtype, rows, columns, inner, tflops):
    operands = (tensor(rows, inner, dtype=dtype), tensor(columns, inner, dtype=dtype))
    time = _prices_of_short_runs(name).op_s(LINEAR, operands, (tensor(rows, columns),), False)
    tolerance = 0.28 if (rows, columns) == (4096, 2112) else 0.20
    assert 2 * rows * columns * inner / time.forward_s / 1e12 == pytest.approx(tflops, rel=tolerance)


# Preset, head dim, sequence length, TFLOP/s forward and backward, causal (FlashAttention-2, figures 4 and 7).
ATTENTIONS = [
    ("h100", 128, 512, 163), ("h100", 128, 1024, 221), ("h100", 128, 4096, 294), ("h100", 128, 16384, 328),
    ("h100", 64, 512, 141), ("h100", 64, 2048, 232), ("h100", 64, 16384, 284),
    ("a100", 128, 512, 99), ("a100", 128, 2048, 155), ("a100", 128, 16384, 189),
    ("a100", 64, 1024, 119), ("a100", 64, 16384, 171),
]  # fmt: skip


@pytest.mark.parametrize(("name", "head_dim", "length", "tflops"), ATTENTIONS)
def test_attention(name, head_dim, length, tflops):
    heads, batch = 2048 // head_dim, 16384 // length
    query = tensor(batch, heads, length, head_dim)
    time = ClusterPrices(Cluster.of(name)).op_s(FLASH, (query,) * 3, (query,), True)
    flops = 3.5 * 4 * length**2 * head_dim * heads * batch / 2
    # Small inputs also pay for launches, reads and writes, which the figure's plateau does not show.
    assert flops / (time.forward_s + time.backward_s) / 1e12 == pytest.approx(tflops, rel=0.20)
