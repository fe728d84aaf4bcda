"""Minimum cuts against those of networkx, which torch needs and so is there."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import networkx
import pytest

from autopar.step.minimum_cut import FlowNetwork


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_side_of_the_least_cut(seed: int) -> None:
    """Small whole capacities, so that there are ties, and edges that are never cut; the same network twice."""
    rng = random.Random(seed)
    nodes = ["source", *range(12), "sink"]
    pairs = list(dict.fromkeys(tuple(sorted(rng.sample(range(14), 2), reverse=rng.random() < 0.2)) for _ in range(40)))
    network = FlowNetwork("source", "sink")
    assert [network.add_edge(nodes[a], nodes[b]) for a, b in pairs + pairs[:3]] == [*range(len(pairs)), 0, 1, 2]
    for _ in range(2):
        capacities = [rng.choice((0.0, 1.0, 2.0, 5.0, math.inf if b != 13 else 3.0)) for _, b in pairs]
        expected = networkx.DiGraph()
        expected.add_nodes_from(nodes)
        expected.add_edges_from(
            (nodes[a], nodes[b], {"capacity": c}) for (a, b), c in zip(pairs, capacities, strict=True)
        )
        value, sides = networkx.minimum_cut(expected, "source", "sink")
        side = network.source_side(capacities)
        assert side == {node for node in sides[0] if node in side or expected.degree(node)}
        assert value == sum(
            c for (a, b), c in zip(pairs, capacities, strict=True) if nodes[a] in side and nodes[b] not in side
        )


@pytest.mark.parametrize("seed", range(8))
def test_rounding_makes_no_cut_dearer(seed: int) -> None:
    """Capacities as in fronts, prices times bytes beside seconds, against fractions."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(14) for b in range(a + 1, 14) if rng.random() < 0.3 or b == a + 1]
    network = FlowNetwork(0, 13)
    for pair in pairs:
        network.add_edge(*pair)
    for _ in range(4):
        price = rng.random() * 1e-8
        capacities = [rng.choice((price * rng.randrange(1 << 24), 1e-3 * rng.random())) for _ in pairs]
        exact = networkx.DiGraph()
        exact.add_edges_from((a, b, {"capacity": Fraction(c)}) for (a, b), c in zip(pairs, capacities, strict=True))
        side = network.source_side(capacities)
        value = sum(c for (a, b), c in zip(pairs, capacities, strict=True) if a in side and b not in side)
        assert value == pytest.approx(float(networkx.minimum_cut_value(exact, 0, 13)), rel=1e-12)
