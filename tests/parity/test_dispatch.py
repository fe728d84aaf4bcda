"""Tokens that are sent to the devices with their experts, once to each node, and their sums that come back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.ops.experts import EXPERTS
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, search
from tests.zoo import STEPS, Subject, assert_parity, rehearse, trained_alone

pytest.importorskip("transformers.integrations.moe")

from tests.parity.test_experts import NUM_EXPERTS, Routed, routed, subject


def on_nodes(program: Program, num_nodes: int, per_node: int, degree: int = 0) -> Plan:
    """The plan that the search finds where so many devices share the experts (0: all), on nodes with slow links."""
    cluster = Cluster.of("h100", nodes=num_nodes, devices_per_node=per_node)
    free = {"latency_s": 0.0, "step_s": 0.0, "ramp_s": 0.0}
    slow = {"ring_step_s": 0.0, "gather_bytes_per_s": 1e9, "all_reduce_bytes_per_s": 1e9,
            "exchange_bytes_per_s": 2e9}  # fmt: skip
    within, between = replace(cluster.within, **free), replace(cluster.between, **free, **slow)
    cluster = replace(cluster, device=replace(cluster.device, launch_s=0.0), within=within, between=between)
    request = SearchRequest(constraints=(f"expert={degree or num_nodes * per_node}",), max_microbatches=1)
    return search(program, num_nodes * per_node, ClusterPrices(cluster), request)


def axes_of_dispatch(program: Program, plan: Plan) -> set[tuple[int, ...]]:
    """Sizes of the axes that dispatch tokens, of each layer with experts."""
    found: set[tuple[int, ...]] = set()
    for planned in plan.layers:
        strategy = plan.strategies[planned.strategy]
        for op, factors in zip(program.kinds[planned.kind].ops, strategy.assignments, strict=True):
            if op.target == EXPERTS:
                pairs = zip(factors, strategy.mesh, strict=True)
                found.add(tuple(size for factor, size in pairs if factor == "dispatch" and size > 1))
    return found


@pytest.mark.parametrize(("name", "nodes", "per_node"), [
    ("skewed", 2, 2), ("skewed", 2, 4), ("all to one", 2, 4), ("random", 2, 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("one each", 2, 2), ("even", 2, 4), ("random", 4, 2))),
])  # fmt: skip
def test_any_routing_on_nodes(name: str, nodes: int, per_node: int):
    who = routed(name)
    plan = on_nodes(who.traced.program, nodes, per_node)
    assert axes_of_dispatch(who.traced.program, plan) == {(nodes, per_node)}
    assert_parity(who, plan, priced=False)


def test_experts_of_two_nodes_each():
    who = routed("skewed")
    plan = on_nodes(who.traced.program, 4, 2, degree=4)
    assert {strategy.mesh for strategy in plan.strategies} == {(2, 2, 2)}
    assert axes_of_dispatch(who.traced.program, plan) == {(2, 2)}
    assert_parity(who, plan, priced=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nodes", "per_node"), [("deepseek", 2, 4), ("qwen", 2, 2), ("gpt-oss", 2, 2)])
def test_models_on_nodes(name: str, nodes: int, per_node: int):
    who = subject(name)
    plan = on_nodes(who.traced.program, nodes, per_node)
    assert (nodes, per_node) in axes_of_dispatch(who.traced.program, plan)
    assert_parity(who, plan, priced=False)


@cache
def every_pair() -> Subject:
    """Four devices, each with a token for each pair of experts: as many as if experts were drawn at random."""
    torch.manual_seed(0)
    pairs = torch.tensor([*itertools.combinations(range(NUM_EXPERTS), 2)] * 4)
    inputs = {"x": torch.randn(len(pairs), 8).double(), "ids": pairs, "weights": torch.rand(pairs.shape).double()}
    return trained_alone(Routed().double(), inputs)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (1, 4)])
def test_what_is_sent_is_what_is_priced(nodes: int, per_node: int):
    who = every_pair()
    plan = on_nodes(who.traced.program, nodes, per_node)
    assert axes_of_dispatch(who.traced.program, plan) == {(2, 2) if nodes > 1 else (4,)}
    assert_parity(who, plan)


def test_tokens_with_all_experts_on_one_node_cross_the_network_once():
    """Of two rows of each token one travels between nodes, there and back, forward and backward."""
    who = trained_alone(Routed().double(), one_node_each())
    plan = on_nodes(who.traced.program, 2, 2)
    ran = rehearse(who, plan).collectives[0]
    between = [each.num_bytes for each in ran if each.kind == "all_to_all" and each.axis == Axis(2, 2)]
    # A device has 4 tokens, two for each node: 2 x 2 slots of 8 columns, and of 2 ids and 2 weights, in float64.
    assert sorted(set(between)) == [4 * 2 * 8, 4 * 8 * 8]
    # Ids, weights, rows and results, and the gradients of the last two: the weights are an input.
    assert len(between) == STEPS * 6


def one_node_each() -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]] * 4)
    return {"x": torch.randn(16, 8).double(), "ids": ids, "weights": torch.rand(16, 2).double()}
