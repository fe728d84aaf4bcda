"""Whole layers that are timed, and the search that runs again on their seconds."""

from functools import cache

import numpy as np
import pytest
import torch

from autopar.balance import Lengths
from autopar.cost import ClusterPrices
from autopar.cost.measure.layer_times import time_layer
from autopar.cost.profile import LayerTime
from autopar.lower.communication.null_communicator import NullCommunicator
from autopar.lower.communication.simulated_ranks import simulate
from autopar.lower.program.single_layer import SingleLayer
from autopar.ops.attention import DOCUMENTS, document_length
from autopar.placement import Axis, local_shape
from autopar.plan import Plan
from autopar.planning.call_traces import trace_model
from autopar.planning.document_lengths import read_lengths, with_lengths
from autopar.planning.group_plans import plan_groups
from autopar.planning.length_plans import FamilyPlanner
from autopar.planning.timed_layers import FamilyTimer, LayerTimer, search_with_timed_layers
from autopar.program import Program
from autopar.search import SearchRequest, check_known, search
from autopar.step.layer.local_layer import whole_strategy
from tests.data.test_balanced import rows_of_tokens, small_llama
from tests.models import make_plain_gpt
from tests.zoo import plan_for, quick_prices, subject


def _collectives(communicator, x):
    axis, across = Axis(2, 1), Axis(2, 2)
    yield communicator.all_gather(x, axis, 1)
    yield communicator.reduce_scatter(x, across, 0)
    yield communicator.all_reduce(x, axis, "max")
    yield communicator.all_to_all(x, across, 0, -1)
    yield communicator.broadcast(x, axis, 1)


def test_nobody_answers_with_the_shapes_and_records_of_real_ranks():
    x = torch.randn(4, 6, 2)

    def run(communicator):
        with communicator.recording() as record:
            return [(y.shape, y.dtype) for y in _collectives(communicator, x)], record

    assert run(NullCommunicator(4)) == simulate(4, run)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constraints"), [("llama", ("tensor=4",)), ("gpt2", ("data=2", "tensor=2")), ("t5", ())]
)
def test_a_lone_layer_computes_what_a_rank_of_the_plan_does(name, constraints):
    program, plan = subject(name, torch.float32).traced.program, plan_for(name, 4, constraints, torch.float32)
    for layer in program.kinds:
        strategy = plan.strategies[plan.layers[program.layers.index(layer)].strategy]
        lone = SingleLayer(program, layer, strategy, plan.num_microbatches)
        outputs = lone.forward()
        for value, output, layout in zip(layer.outputs, outputs, strategy.outputs, strict=True):
            shape = program.type_of(value).shape
            if plan.num_microbatches == 1:
                assert tuple(output.shape) == local_shape(shape, layout, strategy.mesh), value
            assert not output.is_floating_point() or output.isfinite().any()
        if lone.is_differentiable:
            assert all(gradient is None or gradient.isfinite().all() for gradient in lone.backward(outputs))


def test_a_timed_layer_has_documents_as_long_as_its_price_is_for():
    program = trace_model(small_llama(), rows_of_tokens(2, 16)).program
    program = with_lengths(program, read_lengths(4))
    layer = program.layers[1]
    lone = SingleLayer(program, layer, search(program, 2, quick_prices(2), SearchRequest()).strategies[1])
    numbers = lone._inputs[layer.inputs.index(next(op for op in layer.ops if op.target == DOCUMENTS).operands[3])]
    assert numbers[0].tolist() == [place // 4 for place in range(16)]
    lone.backward(lone.forward())


def test_a_timed_layer_takes_longer_if_there_is_more_of_it():
    small, large = (trace_model(*make_plain_gpt(batch=batch)).program for batch in (2, 64))
    seconds = []
    for program in (small, large):
        layer = program.layers[1]
        lone = SingleLayer(program, layer, whole_strategy(layer))
        seconds.append(time_layer(lone.forward, lone.backward, torch.device("cpu"), 0.1))
    assert 0 < seconds[0].forward_s < seconds[1].forward_s / 2
    assert 0 < seconds[0].backward_s < seconds[1].backward_s / 2


class _Slow(LayerTimer):
    """Layers take as long as the prices say, but ten times as long under `slow`; writes down what it was asked."""

    def __init__(self, prices: ClusterPrices, program, budget_s: float = 4.0) -> None:
        super().__init__(program, torch.device("cpu"), budget_s=budget_s)
        self.prices, self.slow, self.asked = prices, None, []

    def time(self, layer, strategy, num_microbatches, *, compiled) -> LayerTime:
        self.asked.append((layer.kind, strategy.mesh, strategy.assignments))
        factor = 10.0 if (layer.kind, strategy.assignments) == self.slow else 1.0
        from autopar.step.layer.local_layer import place

        placed = place(self.program, layer, strategy, num_microbatches)
        times = [
            self.prices.op_s(op, s.operand_types, s.result_types, True)
            for op, s in zip(layer.ops, placed.states, strict=True)
        ]
        return LayerTime(factor * sum(t.forward_s for t in times), factor * sum(t.backward_s for t in times))


@pytest.mark.slow
def test_a_strategy_that_turns_out_slow_loses():
    program, prices = subject("plain_gpt", torch.float32).traced.program, quick_prices(4)

    def planned(timer):
        return search_with_timed_layers(program, 4, prices, SearchRequest(), timer)

    honest = _Slow(prices, program)
    first = planned(honest)
    kind = program.layers[1].kind
    chosen = first.strategies[first.layers[1].strategy]
    assert honest.asked, "nothing was timed"
    assert dict(first.price_source)["layers"] > 0.2
    assert sum(dict(first.price_source).values()) == pytest.approx(1.0)

    slow = _Slow(prices, program)
    slow.slow = (kind, chosen.assignments)
    second = planned(slow)
    assert second.strategies[second.layers[1].strategy].assignments != chosen.assignments

    known = _Slow(prices, program)
    again = planned(known)
    num_asked = len(known.asked)
    assert planned(known).strategies == again.strategies
    assert len(known.asked) == num_asked, "what is known was timed again"


@pytest.mark.slow
def test_no_time_no_timing():
    program, prices = subject("plain_gpt", torch.float32).traced.program, quick_prices(4)
    timer = _Slow(prices, program, budget_s=0.0)
    plan = search_with_timed_layers(program, 4, prices, SearchRequest(), timer)
    assert not timer.asked
    assert "layers" not in dict(plan.price_source)


class _Even(LayerTimer):
    """Every layer takes 1 s forward and 2 s backward for 16 tokens of a row, whatever else its inputs are."""

    def time(self, layer, strategy, num_microbatches, *, compiled) -> LayerTime:
        share = self.program.type_of(self.program.inputs[0]).shape[1] / 16
        return LayerTime(share, 2 * share)


@cache
def _trace(rows: int, tokens: int) -> Program:
    return trace_model(small_llama(), rows_of_tokens(rows, tokens)).program


def _even_timer(prices: ClusterPrices, left_s: float = 4.0) -> FamilyTimer:
    return FamilyTimer(prices, lambda program: _Even(program, torch.device("cpu")), left_s)


class _ByDocuments(LayerTimer):
    """A layer takes 1 s, and an eighth of a second for each token of a document in its attention; backward the same."""

    def time(self, layer, strategy, num_microbatches, *, compiled) -> LayerTime:
        seconds = 1.0 + sum(document_length(op, 16) / 8 for op in layer.ops if op.target == DOCUMENTS)
        return LayerTime(seconds, seconds)


def test_attention_by_length_is_that_of_layers_timed_on_documents_of_two_lengths() -> None:
    prices, program = quick_prices(1), with_lengths(_trace(2, 16), read_lengths(4))
    request = SearchRequest()
    plan = search(program, 1, prices, request)
    timer = FamilyTimer(prices, lambda own: _ByDocuments(own, torch.device("cpu")), 100.0)
    row = check_known(plan, program, timer(program, plan), request).prediction.row
    attends = sum(op.target == DOCUMENTS for layer in program.layers for op in layer.ops)
    for length in (4, 16):
        row_s = row.rows * row.tokens * (row.token_s + length * row.pair_s)
        assert row_s == pytest.approx(2 * (len(program.layers) + attends * length / 8), rel=1e-3)


@pytest.mark.slow
def test_groups_are_priced_by_timed_layers() -> None:
    prices, program = quick_prices(4), _trace(4, 16)
    request = SearchRequest(constraints=("pipeline=1",))
    plan = search(program, 4, prices, request)
    batches = [np.array([16, 12, *[6] * 3, *[3] * 6]), np.array([8, 8, 8, 3, 2])]

    def seconds(timer: FamilyTimer) -> dict[int, float]:
        rows = plan_groups(program, plan, batches, _trace, prices, request, timer).rows
        return {row.tokens: row.row_s + row.pair_s * row.tokens**2 for row in rows}

    found = seconds(_even_timer(prices))
    assert len(found) >= 2
    expected = {tokens: 3.0 * len(program.layers) * tokens / 16 for tokens in found}
    assert found == pytest.approx(expected, rel=1e-3)
    assert max(seconds(_even_timer(prices, left_s=0.0)).values()) < 0.1  # nothing is timed after the budget is spent


@pytest.mark.slow
def test_plans_for_other_lengths_are_priced_by_timed_layers() -> None:
    prices, program = quick_prices(2), _trace(2, 16)
    request = SearchRequest(constraints=("data=2", "pipeline=1"))

    def find(own: Program) -> Plan:
        return search(own, 2, prices, request)

    lengths = Lengths.histogram({8: 0.9, 16: 0.1})
    planner = FamilyPlanner(lengths, _trace, find, prices, request, _even_timer(prices))
    rows = [each.row for each in planner.family(find(program), program).prediction.lengths.plans]
    assert [row.tokens for row in rows] == [16, 8]
    for row in rows:
        seconds = row.rows * (row.token_s * row.tokens + row.pair_s * row.tokens**2)
        assert seconds == pytest.approx(3.0 * len(program.layers) * row.tokens / 16, rel=1e-3)
