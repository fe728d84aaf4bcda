"""What the first call of an op in a layer takes beyond a later one."""

from __future__ import annotations

import math

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.cost.profile import Curve, Point
from autopar.program import Layer, Op, Program, Ref, TensorType, Value

ENTERING_S, AHEAD_S, BACK_S = 7e-6, 5e-6, 3e-6
ONE = TensorType((8, 512), "float32")


def _flat(seconds: float, amount: float = 1e12) -> Curve:
    return Curve((Point(1.0, seconds), Point(amount, seconds)))


def _program() -> Program:
    """Three layers alike, each of three multiplications and a view between them."""
    names = [f"x{index}" for index in range(13)]
    ops = [
        Op(f"op{index}", "aten.transpose.int" if index % 4 == 1 else "aten.mul.Tensor", (Ref(names[index]),), (),
           (names[index + 1],), is_view=index % 4 == 1)
        for index in range(12)
    ]  # fmt: skip
    layers = tuple(
        Layer(f"layer{at}", 0, tuple(ops[4 * at : 4 * at + 4]), (names[4 * at],), (), (names[4 * at + 4],))
        for at in range(3)
    )
    values = {name: Value(name, ONE, "op", requires_grad=True) for name in names}
    return Program(values, layers, (names[0],), {}, {}, (names[-1],))


def _prices(**first: Curve) -> ClusterPrices:
    usual = {f"{name}/{way}": _flat(1e-6) for name in ("elementwise", "view") for way in ("forward", "backward")}
    curves = usual | {f"first/{key}": curve for key, curve in first.items()}
    return ClusterPrices(Cluster.of("cpu"), Profile("cpu", 1, "", {}, curves))


def test_the_first_call_of_each_op_in_a_layer_and_in_backward_the_last_take_longer() -> None:
    program = _program()
    first = {
        "aten.mul/forward": _flat(AHEAD_S),
        "aten.mul/backward": _flat(BACK_S),
        "program/forward": _flat(ENTERING_S),
    }
    prices = _prices(**first).of_program(program, 1)
    for layer in program.layers:
        times = [prices.op_s(op, (ONE,), (ONE,), True) for op in layer.ops]
        assert [time.forward_s for time in times] == pytest.approx([1e-6 + ENTERING_S + AHEAD_S, 1e-6, 1e-6, 1e-6])
        assert [time.backward_s for time in times] == pytest.approx([1e-6, 1e-6, 1e-6, 1e-6 + BACK_S])


def test_the_more_is_moved_between_two_runs_of_a_layer_the_longer_its_first_calls_take() -> None:
    program = _program()
    prices = _prices(**{"aten.mul/forward": Curve((Point(1e4, 1e-6), Point(1e6, 3e-6)))})

    def extra_s(num_devices: int) -> float:
        op = program.layers[1].ops[0]
        return prices.of_program(program, num_devices).op_s(op, (ONE,), (ONE,), False).forward_s - 1e-6

    moved = 4 * 2 * ONE.num_bytes  # by one layer
    assert extra_s(1) == pytest.approx(1e-6 * 3 ** math.log(moved / 1e4, 1e2))  # a straight line in logarithms
    assert extra_s(1) > extra_s(8) > extra_s(1000) == pytest.approx(1e-6)
