"""Layers that offload what they save: order, lifetimes, numbers, host memory, and errors where it does not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar.cluster import Cluster, HostLink
from autopar.cost import ClusterPrices
from autopar.errors import ConstraintError, InfeasibleError
from autopar.lower import ParallelModule
from autopar.lower.compat import local_part_of
from autopar.lower.program import offloading
from autopar.lower.program.offloading import OffloadedTensors
from autopar.lower.program.saved_tensors import SavedTensor
from autopar.lower.run.schedule_lists import schedule_actions
from autopar.plan import Plan
from autopar.schedules import Shape
from autopar.search import SearchRequest, search
from autopar.search.plan_reuse import check_known
from autopar.step.simulation.actions import LayerPolicy, StepActions, lone_copies, step_actions
from autopar.step.training import TrainingSpec
from autopar.trace import trace
from autopar.verify.rehearsal import run_ranks
from tests.random_plans import random_plan, with_stages
from tests.search.across_programs import decoder_model
from tests.search.inner_programs import TablePrices
from tests.zoo import assert_parity, forced_plan, plan_for, rehearse, subject

LINK = HostLink(bytes_per_s=5e10, latency_s=1e-7, memory_bytes=1e12, taken=0.02)
AWAY = ("recompute=none", "offload=activations")
CHOICES = [
    ("data=2", "zero=0", *AWAY),
    ("data=2", "zero=3", "recompute=selective", "offload=activations"),
    ("tensor=2", "recompute=full", "offload=activations"),
    ("data=2", "microbatches=2", "zero=2", *AWAY),
    ("pipeline=2", "schedule=1f1b", "microbatches=2", "model.layers.*: offload=activations"),
    ("pipeline=2", "schedule=zbv", "stages=4", "microbatches=4", "recompute=none", "offload=activations"),
]


FAST = (1, 3, 5)  # each number of microbatches, level of ZeRO and schedule that orders copies otherwise


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "constraints",
    [pytest.param(each, marks=() if n in FAST else pytest.mark.slow) for n, each in enumerate(CHOICES)],
    ids=str,
)
def test_offloading_plans_train_as_one_device_and_the_host_holds_what_is_predicted(
    constraints: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = offloading.host_buffer
    monkeypatch.setattr(offloading, "host_buffer", lambda size, device: (made.append(size), make(size, device))[1])
    who = subject("llama", torch.float64)
    plan = plan_for("llama", 2, constraints, stages=True)
    assert any("offload" in strategy.recompute for strategy in plan.strategies)
    assert_parity(who, plan)
    assert sum(made) > 0
    assert 0 < plan.prediction.host_memory_bytes <= sum(made)


def test_what_is_offloaded_is_not_on_the_device_until_it_is_fetched() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    kept = torch.ones(2)
    saved = [SavedTensor(base.t()[1:]), SavedTensor(base[0]), SavedTensor(kept)]
    values = [each.open().clone() for each in saved]
    tensors = OffloadedTensors(torch.device("cpu"), [kept])
    tensors.take(saved)
    del base
    tensors.offload()
    assert all(each.tensor is not None for each in saved), "there until the copies are made"
    tensors.wait_offload()
    assert [each.tensor is None for each in saved] == [True, True, False]
    tensors.fetch()
    assert saved[0].tensor is None
    tensors.wait_fetch()
    for each, value in zip(saved, values, strict=True):
        assert each.tensor is not None
        torch.testing.assert_close(each.open(), value, rtol=0, atol=0)
    assert saved[0].open().stride() == (1, 4)
    assert saved[0].open().untyped_storage().data_ptr() == saved[1].open().untyped_storage().data_ptr()


def test_a_backward_that_no_action_announced_brings_tensors_back() -> None:
    saved = [SavedTensor(torch.full((3,), float(number))) for number in range(2)]
    tensors = OffloadedTensors(torch.device("cpu"), ())
    tensors.take(saved)
    tensors.offload()
    tensors.wait_offload()
    assert saved[1].open().tolist() == [1.0] * 3
    del saved[1]
    assert saved[0].open().tolist() == [0.0] * 3


def test_copies_start_behind_their_layer_and_end_before_the_next_but_one() -> None:
    program = decoder_model(3, 8, 16, 64, hidden=32, ffn=64, heads=4, kv_heads=2)
    plan = random_plan(program, 2, 0)
    strategies = tuple(replace(s, zero=0, recompute="offload") for s in plan.strategies)
    actions = step_actions(program, replace(plan.decisions, strategies=strategies), TrainingSpec(), None)
    run = [[*actions.of(action)] for action in actions.listed[0]]
    forward, backward = ([each for each in part if "SHARD" not in each.kind] for part in run)
    kinds = [(each.kind, each.layer) for each in forward]
    offloading_layers = [index for kind, index in kinds if kind == "OFFLOAD"]
    assert len(offloading_layers) > 2
    for index in offloading_layers:
        start, end = kinds.index(("OFFLOAD", index)), kinds.index(("WAIT_OFFLOAD", index))
        assert kinds.index(("F", index)) < start < end
        assert [kind for kind, _ in kinds[start:end]].count("F") <= 1
    kinds = [(each.kind, each.layer) for each in backward]
    for index in offloading_layers:
        start, end = kinds.index(("FETCH", index)), kinds.index(("WAIT_FETCH", index))
        assert start < end < kinds.index(("B", index))
        assert [kind for kind, _ in kinds[start:end]].count("B") <= 1


@pytest.mark.parametrize(
    ("schedule", "num_stages", "count"),
    [("gpipe", 2, 4), ("1f1b", 2, 4), ("interleaved_1f1b", 4, 4), ("interleaved_1f1b", 6, 2), ("zbv", 4, 6),
     ("interleaved_zero_bubble", 4, 4)],
)  # fmt: skip
def test_in_stages_each_copy_is_made_once_beside_another_layer(schedule: str, num_stages: int, count: int) -> None:
    layers = 7
    actions = StepActions(
        Shape(schedule, 2, num_stages, count).actions(schedule_actions),
        tuple(range(layers * s // num_stages, layers * (s + 1) // num_stages) for s in range(num_stages)),
        Shape(schedule, 2, num_stages, count).groups,
        (LayerPolicy(False, False, False, splits_backward=True, offloads=True),) * layers,
        has_stages=True, is_training=True, num_microbatches=count,
    )  # fmt: skip
    alone = 0
    for listed in actions.listed:
        done = [
            (step.kind, step.layer, action.microbatch if step.microbatch < 0 else step.microbatch)
            for action in listed
            for step in actions.of(action)
        ]
        assert len(set(done)) == len(done)
        for kind, layer, microbatch in done:
            if kind != "F":
                continue
            back = "I" if ("I", layer, microbatch) in done else "B"
            order = [
                done.index((each, layer, microbatch))
                for each in ("F", "OFFLOAD", "WAIT_OFFLOAD", "FETCH", "WAIT_FETCH", back)
            ]
            assert order == sorted(order)
            computing = [done[start:stop] for start, stop in (order[1:3], order[3:5])]
            alone += sum(not any(step[0] in "FBIW" for step in part) for part in computing)
    # A search counts those that overlap with nothing: a backward is next to its own forward, as in the last stage.
    lone = lone_copies(actions.listed, num_stages)
    assert alone == pytest.approx(count * sum(leaving + coming for leaving, coming in lone))
    assert alone <= 2 * count + 2 < 2 * num_stages * count


@pytest.mark.parametrize("schedule", ["", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def test_random_strategies_offload(schedule: str) -> None:
    import random

    who = subject("llama", torch.float64)
    program = who.traced.program
    plan = random_plan(program, 2, 0, 2 if schedule else 1, joins_outputs=bool(schedule))
    ways = ("offload", "selective+offload", "full+offload")
    strategies = tuple(replace(s, recompute=ways[n % 3]) for n, s in enumerate(plan.strategies))
    plan = plan.with_decisions(strategies=strategies)
    if schedule:
        plan = with_stages(plan, 2, schedule, 4, random.Random(0))
    assert rehearse(who, plan).report.worst_gradient[1] <= 1e-9


def test_the_same_graph_twice() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    x = torch.randn(4, 8)
    (expected,) = torch.autograd.grad(model(x).sum(), [model[0].weight])
    traced = trace(model, (x,), {})
    plan = forced_plan(traced.program, 1, *AWAY)

    def twice(parallel: ParallelModule) -> Tensor:
        loss = parallel(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return next(local_part_of(p.grad) for p in parallel.parameters() if p.shape == expected.shape)

    (gradient,) = run_ranks(model, traced, plan, twice)
    torch.testing.assert_close(gradient, 2 * expected)


def searched(prices: TablePrices, limit: float | None, *constraints: str) -> Plan:
    program = decoder_model(16, 64, 64, 64, hidden=64, ffn=128, heads=4, kv_heads=4)
    return search(program, 2, prices, SearchRequest(limit, constraints=constraints))


@pytest.mark.slow
def test_a_search_offloads_where_memory_is_short_and_copies_are_fast() -> None:
    free = TablePrices()
    fast = replace(free, host_link=replace(LINK, bytes_per_s=2e9))
    constraints = ("data=2", "zero=0", "microbatches=1")
    smallest = searched(free, None, "recompute=full", *constraints)
    with pytest.raises(InfeasibleError):
        searched(free, smallest.peak_memory_bytes * 0.9, *constraints)
    plan = searched(fast, smallest.peak_memory_bytes * 0.9, *constraints)
    assert any("offload" in strategy.recompute for strategy in plan.strategies)
    assert plan.peak_memory_bytes <= smallest.peak_memory_bytes * 0.9
    assert searched(fast, None, *constraints).step_time_s <= plan.step_time_s


@pytest.mark.slow
def test_a_host_without_room_is_said() -> None:
    enough = searched(TablePrices(host_link=LINK), None, "data=2", *AWAY)
    small = TablePrices(host_link=replace(LINK, memory_bytes=enough.prediction.host_memory_bytes / 2))
    with pytest.raises(InfeasibleError, match=r"to the host's memory, of which a device has .* GiB .*recompute more"):
        searched(small, None, "data=2", *AWAY)
    program = decoder_model(16, 64, 64, 64, hidden=64, ffn=128, heads=4, kv_heads=4)
    with pytest.raises(InfeasibleError, match="the plan does not fit: it offloads"):
        check_known(enough, program, small, SearchRequest())


def test_without_a_link_to_the_host_nothing_can_be_offloaded() -> None:
    with pytest.raises(ConstraintError, match="needs a link to the host's memory"):
        searched(TablePrices(), None, *AWAY)


def test_constraints_that_exclude_each_other() -> None:
    prices = TablePrices(host_link=LINK)
    with pytest.raises(ConstraintError, match="contradict each other"):
        searched(prices, None, "offload=activations", "offload=none")
    with pytest.raises(ConstraintError, match="'weights' is none of none, activations"):
        searched(prices, None, "offload=weights")
    kept = searched(prices, None, "recompute=full", "offload=none")
    assert {strategy.recompute for strategy in kept.strategies} == {"full"}


def test_a_superchip_copies_faster_than_a_card() -> None:
    links = {name: ClusterPrices(Cluster.of(name)).host for name in ("a100", "h100", "gb200", "cpu")}
    seconds = [link.copy_s(1e9, 1) for link in (links["gb200"], links["h100"], links["a100"])]
    assert seconds == sorted(seconds)
    assert links["h100"].exposed_s(1.0, 0.4) == pytest.approx(0.6)
    assert not links["cpu"].overlaps
    assert links["cpu"].exposed_s(1.0, 5.0) == 1.0
