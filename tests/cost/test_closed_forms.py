"""Formulas against prices: at every point the formula taken there comes to the price."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.cost.closed_forms import Form, OpForm, describe, layer_forms
from autopar.cost.collective_prices import COLLECTIVES, collective_terms
from autopar.placement import Axis, local_shape
from autopar.plan import LayerStrategy
from autopar.planning.call_traces import trace_model
from autopar.program import TensorType
from tests.models import make

CLUSTER = Cluster.of("h100", nodes=2, devices_per_node=8)
POINTS = tuple(itertools.product((1, 2), (1, 4), (1, 2, 8)))


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


def seconds(form: OpForm, found: Form, point):
    at = {sympy.Symbol(name, positive=True, integer=True): value for name, value in zip(form.names, point, strict=True)}
    return tuple(float(sympy.sympify(each).subs(at)) for each in (found.forward_s, found.backward_s))


def price_one(form: OpForm, point, prices):
    operands, results = (
        tuple(TensorType(local_shape(t.shape, cuts, point), t.dtype) for t, cuts in side)
        for side in (form.operands, form.results)
    )
    time = prices.op_s(form.op, operands, results, form.differentiable)
    return time.forward_s, time.backward_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_formula_is_the_price_of_an_op(name):
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
                for point in POINTS:
                    if divides((*form.operands, *form.results), point):
                        found = replace(form, point=point).form
                        assert seconds(form, found, point) == pytest.approx(price_one(form, point, prices), rel=1e-12)
                        compared += 1
                        cut += bool(sympy.sympify(found.forward_s).free_symbols)
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


def test_collectives_of_many_sizes_at_once():
    sizes = 2.0 ** np.linspace(0, 34, 60)
    prices = ClusterPrices(CLUSTER)
    for kind, axis in itertools.product(COLLECTIVES, (Axis(2, 1), Axis(8, 1), Axis(2, 8), Axis(16, 1))):
        found = collective_terms(CLUSTER, kind, axis).seconds(sizes)
        assert found.tolist() == pytest.approx([prices.collective_s(kind, axis, size) for size in sizes], rel=1e-12)
