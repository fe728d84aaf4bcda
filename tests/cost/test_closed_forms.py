"""Formulas against prices: all at once must be what one after the other is."""

import itertools
import math

import numpy as np
import pytest
import sympy
import torch

from autopar.api import trace_model
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.cost.closed_forms import OpForm, curve_seconds, describe, layer_forms
from autopar.cost.collectives import COLLECTIVES, collective_terms
from autopar.cost.curves import Curve, Point
from autopar.placement import Axis, local_shape
from autopar.plan import LayerStrategy
from autopar.program import TensorType
from tests.models import make

CLUSTER = Cluster.of("h100", nodes=2, devices_per_node=8)
DEGREES = (1, 2, 4, 8)


def strategy(mesh, assignments, time=()):
    return LayerStrategy(mesh, assignments, time, (), (), (), ())


def divides(sides, point):
    """Whether every tensor can be cut so."""
    for tensor, cuts in sides:
        try:
            local_shape(tensor.shape, cuts, point)
        except ValueError:
            return False
    return True


def price_one(form: OpForm, point, prices):
    operands, results = (
        tuple(TensorType(local_shape(t.shape, cuts, point), t.dtype) for t, cuts in side)
        for side in (form.operands, form.results)
    )
    time = prices.op_s(form.op, operands, results, form.differentiable)
    return time.forward_s, time.backward_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_all_at_once_is_one_after_the_other(name):
    program = trace_model(*make(name, torch.float32)).program
    prices = ClusterPrices(CLUSTER)
    compared = cut = 0
    for layer in program.kinds:
        longest = max(len(op.options) for op in layer.ops)
        for outer, inner in ((k, (k * 3 + 1) % longest) for k in range(longest)):
            factors = tuple(
                (op.options[outer % len(op.options)].factor, op.options[inner % len(op.options)].factor)
                if op.options else ("-", "-")
                for op in layer.ops
            )  # fmt: skip
            time = tuple(op.options[0].factor if op.options else "-" for op in layer.ops)
            for form in layer_forms(program, layer, strategy((1, 1), factors, time), CLUSTER.device):
                points = [
                    p
                    for p in itertools.product((1, 2), DEGREES, DEGREES)
                    if divides((*form.operands, *form.results), p)
                ]
                columns = dict(zip(form.names, np.array(points).T, strict=True))
                forward_s, backward_s = form.seconds(columns)
                one_by_one = np.array([price_one(form, point, prices) for point in points])
                np.testing.assert_allclose(forward_s, one_by_one[:, 0], rtol=1e-12, err_msg=form.op.target)
                np.testing.assert_allclose(backward_s, one_by_one[:, 1], rtol=1e-12, err_msg=form.op.target)
                compared += len(points)
                cut += len(np.unique(one_by_one[:, 0])) > 1
    assert compared > 500
    assert cut > 20  # prices that depend on the degrees


def test_a_formula_says_how_the_seconds_of_a_product_come_about():
    program = trace_model(*make("llama", torch.float32)).program
    layer = next(layer for layer in program.kinds if any("linear" in op.target for op in layer.ops))
    at = next(i for i, op in enumerate(layer.ops) if "linear" in op.target)
    batch = next(o.factor for o in layer.ops[at].options if o.operands[0].is_shard and not o.operands[1].is_shard)
    factors = tuple((batch,) if i == at else ("-",) for i in range(len(layer.ops)))
    form = layer_forms(program, layer, strategy((2,), factors), CLUSTER.device)[at].form
    d0 = sympy.Symbol("d0", positive=True, integer=True)
    operands = [program.type_of(name) for name in layer.ops[at].operands]
    rows, inner, columns = math.prod(operands[0].shape[:-1]), operands[0].shape[-1], operands[1].shape[0]
    assert sympy.simplify(form.flops - 2 * rows * inner * columns / d0) == 0
    assert form.forward_s.has(sympy.Max)
    text = describe(program, layer, strategy((2,), factors), CLUSTER.device)
    assert f"{layer.ops[at].name} ({layer.ops[at].target})" in text
    assert "Max(" in text
    assert "d0 = 2" in text


def test_another_formula_holds_where_rows_are_not_aligned():
    """A product whose rows of 128 elements are cut: 16 ways they no longer fill a line of the cache."""
    program = trace_model(*make("llama", torch.float32)).program
    seen = set()
    prices = ClusterPrices(CLUSTER)
    for layer in program.kinds:
        for index, op in enumerate(layer.ops):
            for option in op.options if "linear" in op.target else ():
                factors = tuple((option.factor,) if i == index else ("-",) for i in range(len(layer.ops)))
                form = layer_forms(program, layer, strategy((1,), factors), CLUSTER.device)[index]
                points = [(1, d) for d in DEGREES if divides((*form.operands, *form.results), (1, d))]
                found = form.seconds(dict(zip(form.names, np.array(points).T, strict=True)))[0]
                assert found.tolist() == pytest.approx([price_one(form, p, prices)[0] for p in points], rel=1e-12)
                seen.add(len(form._known))
    assert max(seen) > 1


def test_collectives_of_many_sizes_at_once():
    sizes = 2.0 ** np.linspace(0, 34, 60)
    prices = ClusterPrices(CLUSTER)
    for kind, axis in itertools.product(COLLECTIVES, (Axis(2, 1), Axis(8, 1), Axis(2, 8), Axis(16, 1))):
        found = collective_terms(CLUSTER, kind, axis).seconds(sizes)
        assert found.tolist() == pytest.approx([prices.collective_s(kind, axis, size) for size in sizes], rel=1e-12)


def test_a_measured_curve_of_many_amounts_at_once():
    curve = Curve((Point(1e3, 2e-6), Point(1e5, 1.5e-6), Point(1e6, 9e-6), Point(1e8, 4e-4)))
    amounts = np.concatenate([[1.0, 1e3, 1e5, 1e8], 10.0 ** np.linspace(0, 11, 50)])
    assert curve_seconds(curve, amounts).tolist() == pytest.approx([curve.seconds(x) for x in amounts], rel=1e-12)
