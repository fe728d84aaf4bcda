"""Tokens that are sent to the devices with their experts, once to each node, and their sums that come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.ops.experts import EXPERTS
from autopar.plan import Plan
from autopar.program import Program
from autopar.search import SearchRequest, search
from tests.zoo import assert_parity

pytest.importorskip("transformers.integrations.moe")

from tests.parity.test_experts import routed, subject


def on_nodes(program: Program, num_nodes: int, per_node: int) -> Plan:
    """The plan that the search finds where all devices share the experts, on nodes with slow links between them."""
    cluster = Cluster.of("h100", nodes=num_nodes, devices_per_node=per_node)
    free = {"latency_s": 0.0, "step_s": 0.0, "ramp_s": 0.0}
    slow = {"ring_step_s": 0.0, "gather_bytes_per_s": 1e9, "all_reduce_bytes_per_s": 1e9,
            "exchange_bytes_per_s": 2e9}  # fmt: skip
    within, between = replace(cluster.within, **free), replace(cluster.between, **free, **slow)
    cluster = replace(cluster, device=replace(cluster.device, launch_s=0.0), within=within, between=between)
    request = SearchRequest(constraints=(f"expert={num_nodes * per_node}",), max_microbatches=1)
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nodes", "per_node"), [("deepseek", 2, 4), ("qwen", 2, 2), ("gpt-oss", 2, 2)])
def test_models_on_nodes(name: str, nodes: int, per_node: int):
    who = subject(name)
    plan = on_nodes(who.traced.program, nodes, per_node)
    assert (nodes, per_node) in axes_of_dispatch(who.traced.program, plan)
    assert_parity(who, plan, priced=False)
