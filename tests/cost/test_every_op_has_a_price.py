"""No price, no plan: where a price can't be known, asking for it is an error (`tests.ops.test_traced_models`: every op
of the zoo has one)."""

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices, Profile
from autopar.errors import MissingPriceError
from autopar.placement import Axis
from autopar.program import TensorType
from tests.cost.ops import LINEAR, tensor


def test_what_has_no_number_is_an_error_that_says_what_to_do():
    odd = tensor(64, 64, dtype="float8_e4m3fn")
    with pytest.raises(MissingPriceError, match=r"A100.*float8_e4m3fn.*add it to Device.flops_per_s"):
        ClusterPrices(Cluster.of("a100")).op_s(LINEAR, (odd, odd), (odd,), True)
    with pytest.raises(MissingPriceError, match="gossip"):
        ClusterPrices(Cluster.of("h100")).collective_s("gossip", Axis(8, 1), 1e6)
    assert ClusterPrices(Cluster.of("cpu"), Profile("cpu", 1, "", {}, {})).op_s(
        LINEAR, (TensorType((4, 4), "float32"),) * 2, (TensorType((4, 4), "float32"),), True
    ).source == "estimate"  # fmt: skip
