"""Which rows each rank of a plan passes."""

from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.placement import REPLICATE, shard
from autopar.plan import LayerStrategy
from autopar.search import SearchRequest, search
from autopar.step.layer.data_split import DataSplit, batch_inputs, data_split
from autopar.trace import trace
from tests.models import make
from tests.random_plans import random_plan
from tests.zoo import subject


@pytest.mark.parametrize(
    ("constraints", "ranks"),
    [
        (("data=4",), [0, 1, 2, 3]),
        (("data=2", "tensor=2"), [0, 0, 1, 1]),
        (("tensor=4",), [0, 0, 0, 0]),
        (("stages=2", "data=2"), [0, 1, 0, 1]),
    ],
)
def test_ranks_that_need_the_same_rows_have_the_same_data_rank(constraints: tuple[str, ...], ranks: list[int]) -> None:
    program, prices = subject("plain_gpt").traced.program, ClusterPrices(Cluster.of("cpu", devices_per_node=4))
    plan = search(program, 4, prices, SearchRequest(constraints=constraints, schedules=schedule_actions))
    split = data_split(program, plan.decisions)
    assert split.size == max(ranks) + 1
    assert [split.rank_of(rank) for rank in range(4)] == ranks


def test_axes_that_split_rows_nest_as_in_a_layout() -> None:
    split = DataSplit((2, 3, 2), (shard(0), REPLICATE, shard(0)))
    assert split.size == 4
    assert [split.rank_of(rank) for rank in range(12)] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]
    assert split.rank_of(12) == 0  # the first place of the next pipeline stage


def test_the_first_op_that_splits_rows_decides_even_behind_ops_that_do_not() -> None:
    model, inputs = make("plain_gpt")
    program = trace(model, (), inputs).program
    plan = random_plan(program, 4, 0)
    embedding, addition = program.layers[0].ops
    for factors in (("d0", "-"), ("-", "d0"), ("-", "-")):  # d0: the dim 0 of ids, and of the sum
        names = dict(zip((embedding.name, addition.name), factors, strict=True))
        strategies = tuple(
            LayerStrategy((4,), tuple((names.get(op.name, "-"),) for op in layer.ops), (), (), (), (), ())
            for layer in program.layers
        )
        layers = tuple(replace(layer, strategy=index) for index, layer in enumerate(plan.layers))
        found = data_split(program, plan.with_decisions(strategies=strategies, layers=layers).decisions)
        assert found.size == (4 if "d0" in factors else 1)


def test_inputs_with_as_many_rows_as_the_first_are_of_the_batch() -> None:
    model, inputs = make("bert")
    program = trace(model, (), inputs).program
    assert batch_inputs(program) == program.inputs
    model, inputs = make("plain_gpt")
    program = trace(model, (), inputs).program
    first, second = program.inputs
    values = {
        **program.values,
        second: replace(program.values[second], type=replace(program.type_of(second), shape=(3,))),
    }
    assert batch_inputs(replace(program, values=values)) == (first,)
