"""A decoder layer of an 8B model, priced by hand for three strategies on 8 H100s: which one wins is known.

With one sequence of 4k tokens tensor and sequence parallel, with 8 of them data parallel, with one of 64k
tokens Ulysses.  A search can only find these if the prices say so.
"""

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.placement import Axis
from tests.cost.ops import ATTENTION, LINEAR, MUL, tensor

HIDDEN, FFN, HEADS, KV_HEADS, DEVICES = 4096, 14336, 32, 8, 8
KV = HIDDEN // HEADS * KV_HEADS
PARAMETERS = HIDDEN * (2 * HIDDEN + 2 * KV + 3 * FFN) + 2 * HIDDEN
PRICES = ClusterPrices(Cluster.of("h100"))
AXIS = Axis(DEVICES, 1)


def _compute_s(tokens: int, sequences: float, length: int, split: int) -> float:
    """The layer on local tokens, with heads and ffn cut `split` ways and attention on whole sequences."""

    def linear(rows: int, inner: int, columns: int) -> float:
        return _both(LINEAR, (tensor(rows, inner), tensor(columns, inner)), tensor(rows, columns))

    products = (
        2 * linear(tokens, HIDDEN, HIDDEN // split) + 2 * linear(tokens, HIDDEN, KV // split)
        + 2 * linear(tokens, HIDDEN, FFN // split) + linear(tokens, FFN // split, HIDDEN)
    )  # fmt: skip
    heads = round(HEADS * sequences)
    query = tensor(1, heads, length, HIDDEN // HEADS)
    return products + _both(ATTENTION, (query,) * 3, query)


def _both(an_op, operands, result) -> float:
    taken = PRICES.op_s(an_op, operands, (result,), True)
    return taken.forward_s + taken.backward_s


def _elementwise_s(tokens: int, width: int) -> float:
    x = tensor(tokens, width)
    return _both(MUL, (x, x), x)


def _layer_s(strategy: str, batch: int, length: int) -> float:
    tokens = batch * length
    local = tokens // DEVICES
    gradients_s = PRICES.collective_s("all_reduce", AXIS, 2 * PARAMETERS)
    outside_s = 12 * _elementwise_s(local, HIDDEN) + 2 * _elementwise_s(local, FFN)
    if strategy == "tensor":
        gathered = 2 * tokens * HIDDEN
        moves = [PRICES.collective_s(kind, AXIS, gathered) for kind in ("all_gather", "reduce_scatter")]
        return outside_s + _compute_s(tokens, batch / DEVICES, length, DEVICES) + 4 * sum(moves)
    compute_s = outside_s + _compute_s(local, batch / DEVICES, length, 1) + gradients_s
    if strategy == "data":
        return compute_s
    exchanges = [PRICES.collective_s("all_to_all", AXIS, 2 * local * width) for width in (HIDDEN, HIDDEN, KV, KV)]
    return compute_s + 2 * sum(exchanges)


@pytest.mark.parametrize(
    ("batch", "length", "strategies", "best"),
    [
        (1, 4096, ("tensor", "ulysses"), "tensor"),
        (8, 4096, ("tensor", "ulysses", "data"), "data"),
        (1, 65536, ("tensor", "ulysses"), "ulysses"),
    ],
)
def test_the_known_winner_wins_by_more_than_noise(batch, length, strategies, best):
    seconds = {strategy: _layer_s(strategy, batch, length) for strategy in strategies}
    others = [s for strategy, s in seconds.items() if strategy != best]
    assert seconds[best] < 0.98 * min(others), seconds


def test_the_collectives_of_such_a_layer_take_what_is_known():
    assert PRICES.collective_s("all_gather", AXIS, 2**25) == pytest.approx(0.13e-3, rel=0.25)
    assert PRICES.collective_s("all_reduce", AXIS, 436e6) == pytest.approx(1.7e-3, rel=0.1)
