"""No price, no plan: every op of every model costs something, or asking for its price is an error."""

import pytest
import torch

from autopar.api import trace_model
from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.errors import MissingPriceError
from autopar.ops import count_work
from autopar.placement import Axis
from autopar.program import TensorType
from tests.cost.ops import LINEAR, tensor
from tests.models import ZOO, make

KNOWN = {"layers", "scaled", "measured", "published", "calibrated", "estimate"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_op_of_the_zoo_has_a_price_and_says_what_it_rests_on(name):
    program = trace_model(*make(name, torch.float32)).program
    for cluster in ("cpu", "h100"):
        prices = ClusterPrices(Cluster.of(cluster))
        for op in (op for layer in program.layers for op in layer.ops):
            operands, results = (tuple(map(program.type_of, names)) for names in (op.operands, op.results))
            has_gradient = any(program.values[name].requires_grad for name in op.results)
            time = prices.op_s(op, operands, results, has_gradient)
            is_view = count_work(op, operands, results).kind == "view"
            assert time.source in KNOWN
            assert time.forward_s > 0 or is_view, op.target
            assert time.backward_s >= 0


def test_what_has_no_number_is_an_error_that_says_what_to_do():
    odd = tensor(64, 64, dtype="float8_e4m3fn")
    with pytest.raises(MissingPriceError, match=r"A100.*float8_e4m3fn.*add it to Device.flops_per_s"):
        ClusterPrices(Cluster.of("a100")).op_s(LINEAR, (odd, odd), (odd,), True)
    with pytest.raises(MissingPriceError, match="gossip"):
        ClusterPrices(Cluster.of("h100")).collective_s("gossip", Axis(8, 1), 1e6)
    assert ClusterPrices(Cluster.of("cpu"), Profile("cpu", 1, "", {}, {})).op_s(
        LINEAR, (TensorType((4, 4), "float32"),) * 2, (TensorType((4, 4), "float32"),), True
    ).source == "estimate"  # fmt: skip
