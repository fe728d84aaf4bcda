"""Prices between the points of a profile."""

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.cost.profile import Curve, Point
from tests.cost.ops import ATTENTION, LINEAR, MUL, op, tensor


def _prices(**curves: float) -> ClusterPrices:
    """Of a device on which each of these takes so many seconds per unit of work, whatever the size."""
    named = {
        f"{key}/{way}": Curve(tuple(Point(amount, amount * rate) for amount in (1e2, 1e12)))
        for key, rate in curves.items()
        for way in ("forward", "backward")
    }
    return ClusterPrices(Cluster.of("cpu"), Profile("cpu", 1, "", {}, named))


def _linear_s(prices: ClusterPrices, rows: int, inner: int, columns: int) -> float:
    types = tensor(rows, inner, dtype="float32"), tensor(columns, inner, dtype="float32")
    return prices.op_s(LINEAR, types, (tensor(rows, columns, dtype="float32"),), False).forward_s


def test_products_take_the_rate_of_the_nearest_shapes_not_of_the_nearest_flops() -> None:
    narrow, wide = 4e-9, 1e-9
    grid = {f"matmul/float32/{n}x{m}": wide if min(n, m) > 64 else narrow for n in (32, 512) for m in (32, 512)}
    prices = _prices(**grid)
    assert _linear_s(prices, 128, 512, 512) == pytest.approx(wide * 2 * 128 * 512 * 512)
    assert _linear_s(prices, 4096, 32, 256) == pytest.approx(narrow * 2 * 4096 * 32 * 256)
    # a fifth of the way from 32 to 512
    parts = 0.8 * narrow * 2 * 64 * 32 * 512, 0.2 * wide * 2 * 64 * 512 * 512
    assert _linear_s(prices, 64, 128, 512) == pytest.approx(sum(parts))
    assert _linear_s(prices, 64, 2048, 512) == pytest.approx(wide * 2 * 64 * 2048 * 512)


def test_products_are_priced_on_what_there_is_of_an_interrupted_sweep() -> None:
    prices = _prices(**{f"matmul/float32/{shape}": 1e-9 for shape in ("32x32", "32x512", "512x512", "2048x32")})
    for inner, columns in ((32, 512), (512, 32), (256, 256), (2048, 1024), (8192, 64)):
        assert _linear_s(prices, 4096, inner, columns) >= 1e-9 * 2 * 4096 * inner * columns * (1 - 1e-9)


def test_heads_of_other_sizes_and_full_attention_have_their_own_rates() -> None:
    prices = _prices(**{"attention/float32/causal/16/64": 3e-9, "attention/float32/full/16/64": 1e-9})
    shape = tensor(2, 4, 64, 16, dtype="float32")
    causal = prices.op_s(ATTENTION, (shape,) * 3, (shape,), True)
    full = prices.op_s(op("aten.scaled_dot_product_attention.default", 3), (shape,) * 3, (shape,), True)
    assert causal.forward_s == pytest.approx(3 / 2 * full.forward_s)  # half of the flops at a third of the rate
    assert full.backward_s == pytest.approx(2.5 * full.forward_s)


def test_attention_between_lengths_is_linear_in_pairs_at_the_same_number_of_heads() -> None:
    prices = _prices(**{"attention/float32/full/16/32": 2e-9, "attention/float32/full/16/128": 1e-9})
    attend = op("aten.scaled_dot_product_attention.default", 3)

    def seconds(length: int) -> float:
        shape = tensor(2, 4, length, 16, dtype="float32")
        return prices.op_s(attend, (shape,) * 3, (shape,), False).forward_s

    part = (64**2 - 32**2) / (128**2 - 32**2)
    assert seconds(64) == pytest.approx((1 - part) * seconds(32) + part * seconds(128))
    assert seconds(512) == pytest.approx(16 * seconds(128))


def test_a_narrow_row_an_addition_and_a_number_are_priced_as_what_they_are() -> None:
    prices = _prices(
        **{"op/aten.softmax/32": 8e-9, "op/aten.softmax/512": 2e-9, "elementwise": 1e-9, "op/aten.mul/number": 5e-9}
    )
    softmax, types = op("aten.softmax.int", 1, (1,)), (tensor(64, 128, dtype="float32"),)
    assert prices.op_s(softmax, types, types, False).forward_s == pytest.approx(4e-9 * 2 * 4 * 64 * 128)
    big, row = tensor(64, 512, dtype="float32"), tensor(512, dtype="float32")
    plain = prices.op_s(op("aten.add.Tensor", 2), (big, big), (big,), True)
    broadcast = prices.op_s(op("aten.add.Tensor", 2), (big, row), (big,), True)
    assert 0 < plain.backward_s < broadcast.backward_s / 100  # nothing to compute, against a sum
    assert prices.op_s(MUL, (big, big), (big,), False).forward_s == pytest.approx(1e-9 * 3 * big.num_bytes)
