"""Tokens that are sent to the devices with their experts, once to each node, and their sums that come back."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.lower.communication.shards import Shards
from autopar.lower.kernels.experts import parts_of_dispatch
from autopar.ops.experts import EXPERTS, Body, read_body
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.step.costs.layer_cost import running_collectives
from autopar.step.costs.op_seconds import op_seconds
from autopar.step.layer.instructions import InParts, RunOp
from autopar.step.layer.local_layer import place
from autopar.step.layer.local_program import derive
from autopar.step.prices import run_s
from autopar.step.training import TrainingSpec
from tests.zoo import STEPS, Subject, assert_parity, quick_prices, rehearse, trained_alone

pytest.importorskip("transformers.integrations.moe")

from tests.parity.test_experts import NUM_EXPERTS, Routed, routed, routing, subject


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
    ("skewed", 2, 2), ("random", 2, 2),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in (("all to one", 2, 4), ("one each", 2, 2), ("random", 4, 2))),
])  # fmt: skip
def test_any_routing_on_nodes(name: str, nodes: int, per_node: int):
    who = routed(name)
    plan = on_nodes(who.traced.program, nodes, per_node)
    assert axes_of_dispatch(who.traced.program, plan) == {(nodes, per_node)}
    assert_parity(who, plan, priced=False)


@pytest.mark.slow
def test_experts_of_two_nodes_each():
    who = routed("skewed")
    plan = on_nodes(who.traced.program, 4, 2, degree=4)
    assert {strategy.mesh for strategy in plan.strategies} == {(2, 2, 2)}
    assert axes_of_dispatch(who.traced.program, plan) == {(2, 2)}
    assert_parity(who, plan, priced=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nodes", "per_node"), [("deepseek", 2, 4), ("gpt-oss", 2, 2)])
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


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_what_is_sent_is_what_is_priced(nodes: int, per_node: int):
    who = every_pair()
    plan = on_nodes(who.traced.program, nodes, per_node)
    assert axes_of_dispatch(who.traced.program, plan) == {(2, 2) if nodes > 1 else (4,)}
    assert_parity(who, plan)


class Limited(Routed):
    """A token has three experts, all in the better one of two groups; `form` is how the router writes that."""

    def __init__(self, form: str = "") -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
        """A scalar."""
        size = NUM_EXPERTS // 2
        hidden = self.mix(x)
        best = scores.view(-1, 2, size).amax(-1).topk(1, dim=-1).indices
        marks = torch.zeros_like(scores[:, :2]).scatter(1, best, 1.0)
        by_expert = marks.unsqueeze(-1).expand(-1, -1, size).reshape(-1, NUM_EXPERTS)
        if self.form == "interleaved":
            by_expert = marks.unsqueeze(1).expand(-1, size, -1).reshape(-1, NUM_EXPERTS)
        elif self.form == "others":
            by_expert = 1.0 - by_expert
        if self.form == "hidden groups":
            hidden_groups = torch.ones_like(marks, dtype=torch.bool).scatter(1, best, False)
            left = scores.view(-1, 2, size).masked_fill(hidden_groups.unsqueeze(-1), -torch.inf).flatten(1)
        else:
            left = scores.masked_fill(~by_expert.bool(), 9.0 if self.form == "favored" else 0.0)
        ids = left.topk(3, dim=-1).indices
        return (hidden + self.experts(hidden, ids.reshape(-1), weights)).square().mean()


@cache
def every_triple_of_a_group() -> Subject:
    """Four devices, each with tokens for each three experts of each group."""
    torch.manual_seed(0)
    scores = [[float(group == g) * (e != left) + 0.5 * (group == g) for g in range(2) for e in range(4)]
              for group in range(2) for left in range(4)] * 16  # fmt: skip
    inputs = {"x": torch.randn(128, 8).double(), "scores": torch.tensor(scores).double()}
    return trained_alone(Limited().double(), {**inputs, "weights": torch.rand(128, 3).double()})


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_a_token_is_sent_to_no_more_groups_of_experts_than_its_router_chooses(nodes: int, per_node: int):
    who = every_triple_of_a_group()
    plan = on_nodes(who.traced.program, nodes, per_node)
    assert axes_of_dispatch(who.traced.program, plan) == {(2, 2) if nodes > 1 else (4,)}
    assert_parity(who, plan)  # what is sent is what is priced


@pytest.mark.parametrize(("form", "num_tokens", "groups"), [
    ("", 16, (2, 1)), ("hidden groups", 8192, (2, 1)), ("interleaved", 16, (1, 1)), ("others", 16, (1, 1)),
    ("favored", 16, (1, 1)),
])  # fmt: skip
def test_groups_are_those_that_a_router_leaves(form: str, num_tokens: int, groups: tuple[int, int]):
    inputs = {name: torch.rand(num_tokens, width) for name, width in (("x", 8), ("scores", 8), ("weights", 3))}
    ops = [op for layer in trace_model(Limited(form), inputs).program.layers for op in layer.ops]
    (op,) = [op for op in ops if op.target == EXPERTS]
    assert read_body(str(op.args[6])).groups == groups


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


class Shared(Routed):
    """With an expert that all tokens share, computed in front of the others or behind them."""

    def __init__(self, *, in_front: bool) -> None:
        super().__init__()
        self.in_front = in_front
        self.shared = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        hidden = self.mix(x)
        of_all = self.shared(hidden) if self.in_front else None
        routed = self.experts(hidden, ids.reshape(-1), weights)
        of_all = self.shared(hidden) if of_all is None else of_all
        return (hidden + routed + of_all).square().mean()


@cache
def with_shared(*, in_front: bool) -> Subject:
    torch.manual_seed(0)
    ids = routing("skewed").repeat(64, 1)  # so many that a device does not compute those of all
    inputs = {"x": torch.randn(len(ids), 8).double(), "ids": ids, "weights": torch.rand(ids.shape).double()}
    return trained_alone(Shared(in_front=in_front).double(), inputs)


def pauses_of(program: Program, plan: Plan) -> list[list[list[str]]]:
    """Targets of the ops in the pauses of each kernel that runs in parts."""
    found: list[list[list[str]]] = []
    for planned in plan.layers:
        layer = program.kinds[planned.kind]
        local = derive(place(program, layer, plan.strategies[planned.strategy], plan.num_microbatches))
        for each in local.instructions:
            if isinstance(each, InParts):
                found.append([[x.op.target.split(".")[1] for x in p if isinstance(x, RunOp)] for p in each.pauses])
    return found


@pytest.mark.parametrize(
    ("nodes", "per_node", "in_front"), [(1, 2, False), (2, 2, True), pytest.param(1, 2, True, marks=pytest.mark.slow)]
)
def test_shared_experts_compute_while_tokens_travel(nodes: int, per_node: int, in_front: bool):
    who = with_shared(in_front=in_front)
    program = who.traced.program
    plan = on_nodes(program, nodes, per_node)
    assert pauses_of(program, plan) == [[["linear"], ["gelu", "linear"]]]
    assert_parity(who, plan, priced=False)


def test_microbatches_and_recomputation_with_kernels_in_parts():
    who = with_shared(in_front=False)
    program = who.traced.program
    found = search(
        program, 2, quick_prices(2), SearchRequest(constraints=("expert=2", "recompute=full", "microbatches=2"))
    )
    assert pauses_of(program, found)
    assert_parity(who, found, priced=False)


def test_no_more_seconds_are_hidden_than_pauses_compute():
    who = with_shared(in_front=False)
    program = who.traced.program
    plan = on_nodes(program, 2, 2)
    assert not pauses_of(routed("skewed").traced.program, on_nodes(routed("skewed").traced.program, 2, 2))
    (index,) = (
        i for i, each in enumerate(plan.layers) if any(op.target == EXPERTS for op in program.kinds[each.kind].ops)
    )
    layer, strategy = program.layers[index], plan.strategies[plan.layers[index].strategy]
    placed, prices = place(program, layer, strategy, 1), quick_prices(4)
    times = op_seconds(placed, prices, TrainingSpec())
    products = [n for n, op in enumerate(layer.ops) if "linear" in op.target][-2:]
    computing_s = sum(times[n].forward_s for n in range(products[0], products[1] + 1) if layer.ops[n].target != EXPERTS)
    runs = [run for run in running_collectives(placed, TrainingSpec(), prices) if run.kind == "all_to_all"]
    hidden_s = {
        axis: sum(run.hidden_s for run in runs if run.axis == axis and run.phase == "forward")
        for axis in (Axis(2, 2), Axis(2, 1))
    }
    assert hidden_s[Axis(2, 1)] == 0  # inside a node it is waited for
    assert 0 < hidden_s[Axis(2, 2)] <= computing_s * (1 + 1e-9)
    assert all(run_s(run, prices) >= 0 for run in runs)


def test_a_stage_on_one_device_has_the_pauses_of_others():
    """Experts with a shared one, by a plan that sends tokens on an axis of one device."""
    tokens = torch.arange(8).view(4, 2)
    shards: Any = Shards
    shards = shards(None, ())  # nothing is communicated
    parts = parts_of_dispatch(shards, tokens.view(-1), [], [torch.ones(8)], [], tokens, 8, Body((), "", {}, 0.0).text())
    next(parts)
    next(parts)
