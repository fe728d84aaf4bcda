"""Plans for groups: what they may take of memory, and what a step of them costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.lower.communication.communicator import Communicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.groups.coupling import Coupling
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.lower.run.stage_map import StageMap
from autopar.plan.prediction import GroupRow
from autopar.planning.call_traces import trace_model
from autopar.planning.caller_inputs import call_inputs
from autopar.planning.group_plans import (
    GroupKind,
    coupling_seconds,
    nested_peak_bytes,
    part_bytes,
    plan_groups,
    why_no_groups,
)
from autopar.planning.splitting import splittable, variant_like
from autopar.program import Program
from autopar.search import SearchRequest, search
from autopar.verify.rehearsal import keep_double_program, planner_for
from tests.data.test_balanced import rows_of_tokens, small_llama
from tests.lower.runs import build, loss_of
from tests.zoo import quick_prices

TOKENS = 16


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "asked",
    [
        "data=4 zero=1",
        "pipeline=2 zero=0",
        "pipeline=2 stages=4 schedule=interleaved_1f1b zero=1",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in ("data=4 zero=0", "data=2 tensor=2 zero=3", "pipeline=2 zero=1")
        ),
    ],
)
def test_what_couples_groups_is_priced_as_it_runs(asked: str) -> None:
    model, prices = small_llama(), quick_prices(4)
    if "pipeline=2 zero=0" in asked:
        model.lm_head.weight = model.model.embed_tokens.weight
    traced = trace_model(model, rows_of_tokens(4, TOKENS))
    request = SearchRequest(constraints=tuple(asked.split()), schedules=schedule_actions)
    plan = search(traced.program, 4, prices, request)
    stages = StageMap(traced.program, plan, 0)

    def rank(talk: Communicator) -> float:
        made: Any = build(model, traced, plan, talk)
        coupling = Coupling(traced.program, made._store, talk, made._executor.stages)
        with talk.recording() as record:
            whole = dict(coupling.gather())
            found = coupling.reduce(lambda name: torch.ones_like(whole[name]))
        for name, tensor in whole.items():
            assert torch.equal(tensor, model.get_parameter(name))
        for name, parameter in model.named_parameters():  # a term of each rank that holds it
            terms = float(plan.group_size * len(stages.holders[name]))
            assert torch.equal(made._whole(name, found.get(name)), torch.full_like(parameter, terms))
        updates_s = sum(plan.costs[layer].optimizer_s for layer in made._executor.stages.own_layers)
        return updates_s + sum(prices.collective_s(each.kind, each.axis, each.num_bytes) for each in record)

    priced_s = coupling_seconds(traced.program, plan, prices, request.training)
    found = simulate(4, rank)
    assert max(found) == pytest.approx(priced_s)
    assert plan.stages or found == pytest.approx([priced_s] * 4)


@pytest.mark.slow
def test_groups_get_the_memory_that_is_left() -> None:
    model, prices = small_llama(), quick_prices(4)

    def trace(rows: int, tokens: int) -> Program:
        return trace_model(model, rows_of_tokens(rows, tokens)).program

    program = trace(4, TOKENS)
    request = SearchRequest(constraints=("pipeline=1",))
    plan = search(program, 4, prices, request)
    assert not why_no_groups(program, plan, request)
    assert not why_no_groups(program, plan, replace(request, constraints=("pipeline = 2",)))
    assert "constraints" in why_no_groups(program, plan, replace(request, constraints=("data=4",)))
    assert "not divided by what inputs count" in why_no_groups(replace(program, loss=""), plan, request)
    batches = [np.array([TOKENS, 12, *[6] * 3, *[3] * 6]), np.array([8, 8, 8, 3, 2])]
    found = plan_groups(program, plan, batches, trace, prices, request)
    kinds = [(each.degree, each.tokens) for each in found.rows]
    assert found.nests
    assert kinds[0] == (2, TOKENS)
    assert kinds == sorted(kinds, reverse=True)
    assert len({tokens for _, tokens in kinds}) == len(kinds) >= 3
    assert [(each.decisions.world_size, each.tokens) for each in found.plans] == kinds
    assert {strategy.zero for each in found.plans for strategy in each.decisions.strategies} == {0}
    held_bytes = sum(cost.static_bytes for cost in plan.costs)
    # A device of a group holds all parameters and their gradients beside that.
    whole_bytes = sum(p.nbytes for p in model.parameters())
    assert all(each.peak_bytes >= held_bytes + 2 * whole_bytes for each in found.rows if each.degree == 1)
    small = replace(plan, memory_limit_bytes=1.5 * held_bytes)
    assert not plan_groups(program, small, batches, trace, prices, request).plans
    assert not plan_groups(program, replace(plan, decisions=replace(plan.decisions, world_size=2)), batches, trace,
                           prices, request).plans  # fmt: skip


@pytest.mark.slow
def test_devices_are_in_several_groups_if_memory_holds_the_parts_of_all() -> None:
    model, prices = small_llama(), quick_prices(4)

    def trace(rows: int, tokens: int) -> Program:
        return trace_model(model, rows_of_tokens(rows, tokens)).program

    by_degree = [(2, ("tensor=2",)), (1, ())]
    kinds: list[GroupKind] = []
    for degree, constraints in by_degree:
        one = trace(1, TOKENS)
        found = search(one, degree, prices, SearchRequest(constraints=(*constraints, "zero=0")))
        parts = part_bytes(one, found, SearchRequest().training)
        static_bytes = sum(cost.parameter_bytes + cost.gradient_bytes for cost in found.costs)
        others_bytes = static_bytes - sum(parts.values())
        assert 0 <= others_bytes <= sum(x.nbytes for x in model.buffers())  # those that layers read
        kinds.append(GroupKind(GroupRow(degree, TOKENS, 1.0, 0.0), found, parts, found.peak_memory_bytes))
    split, whole = kinds
    # Norms are whole in both, and are there once.
    shared = sum(num_bytes for part, num_bytes in whole.parts.items() if part in split.parts)
    assert 0 < shared < 0.1 * sum(whole.parts.values())
    needed = nested_peak_bytes(kinds)
    beside = max(kind.peak_bytes - sum(kind.parts.values()) for kind in kinds)
    assert needed == pytest.approx(sum(sum(kind.parts.values()) for kind in kinds) - shared + beside)
    assert nested_peak_bytes([whole]) == pytest.approx(whole.plan.peak_memory_bytes)


class _Balanced(nn.Module):
    """Puts out a product of means over all tokens, which is computed once from the sums of all microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embedding(input_ids).relu())
        chosen = logits.softmax(-1).mean((0, 1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), (chosen * chosen).sum().detach()


@pytest.mark.slow
def test_groups_run_what_a_model_with_a_tail_is_changed_to() -> None:
    torch.manual_seed(0)
    model, prices = _Balanced().double(), quick_prices(4)

    def example(rows: int, tokens: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 32, (rows, tokens))
        return {"input_ids": ids, "labels": ids.roll(1, 1)}

    def trace(rows: int, tokens: int) -> Program:
        return keep_double_program(trace_model(model, example(rows, tokens))).program

    first = example(4, TOKENS)
    traced = keep_double_program(trace_model(model, first))
    request = SearchRequest(constraints=("pipeline=1",))
    program = splittable(traced.program, request, 4)
    assert program.tail
    plan = search(program, 4, prices, request)
    groups = plan_groups(program, plan, [np.array([TOKENS, 8, 8])], trace, prices, request).plans
    assert {group.tokens for group in groups} >= {TOKENS, 8}
    assert all(variant_like(trace(1, group.tokens), program).tail for group in groups)
    plan = replace(plan, groups=groups)
    traced = replace(traced, program=program)
    planner = planner_for(model, traced, plan, [], keep_double_program, training=True)
    planner.groups((), first, (4, TOKENS))
    long, *short = example(1, TOKENS), example(1, 8), example(2, 8)

    def rank(talk: Communicator) -> tuple[float, Tensor]:
        made: Any = build(model, traced, plan, talk, planner=planner)
        made.call_inputs = call_inputs(model, first, program, made.data_split, talk, is_local=True)
        loss = loss_of(made(**[long, long, *short][talk.rank]))
        loss.backward()
        return loss.item(), made._whole("head.weight", made.head.weight.grad)

    rows = [long, *short]
    flat = {name: torch.cat([each[name].flatten() for each in rows])[None] for name in long}
    expected = loss_of(model(**flat))
    expected.backward()
    for loss, gradient in simulate(4, rank):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(gradient, model.head.weight.grad, rtol=0, atol=1e-12)
