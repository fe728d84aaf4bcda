"""Collectives in pieces beside products: the numbers of one device, the collectives that are priced, legal plans."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.cluster import OpTime
from autopar.cost import ClusterPrices
from autopar.errors import ConstraintError, PlanFormatError, PlanMismatchError
from autopar.placement import Axis
from autopar.plan import Plan
from autopar.program import Op, TensorType
from autopar.search import SearchRequest, search
from autopar.step.costs.piece_seconds import hidden_s
from autopar.step.layer.instructions import InPieces
from autopar.step.layer.local_program import local_program
from autopar.step.layer.pieces import pieced_collectives, with_count
from autopar.step.layer.planned_layers import PlannedLayers
from autopar.step.plan_check import check_fit
from autopar.step.pricing import predict
from autopar.step.training import TrainingSpec
from tests.end_to_end.harness import assert_same_step, launch, make, parallelize
from tests.zoo import assert_parity, plan_for, quick_prices, subject


def pieces_of(plan: Plan) -> dict[str, int]:
    return {name: count for strategy in plan.strategies for name, count in strategy.pieces}


def in_pieces(name: str, plan: Plan) -> list[InPieces]:
    """Every collective of a plan that runs in pieces, once for each layer."""
    layers = PlannedLayers(subject(name).traced.program, plan.decisions)
    found = [each for placed in layers.placed for each in local_program(placed).instructions]
    return [each for each in found if isinstance(each, InPieces)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "world_size", "constraints"),
    [
        ("llama", 2, ("tensor=2", "pieces=2")),
        pytest.param("llama", 4, ("tensor=2", "data=2", "pieces=4", "recompute=full"), marks=pytest.mark.slow),
        ("llama", 2, ("tensor=2", "pieces=2", "microbatches=2", "recompute=selective")),
        pytest.param("bert", 4, ("tensor=4", "pieces=4"), marks=pytest.mark.slow),
        ("gpt2", 2, ("tensor=2", "pieces=2")),
    ],
)
def test_training_in_pieces_is_that_of_one_device(name: str, world_size: int, constraints: tuple[str, ...]) -> None:
    plan = plan_for(name, world_size, constraints)
    assert in_pieces(name, plan)
    assert_parity(subject(name), plan)


def test_both_ways_run_in_pieces() -> None:
    """A gather before three products, and a reduction behind one; rows of a sequence and of a batch."""
    found = in_pieces("llama", plan_for("llama", 2, ("tensor=2", "pieces=2")))
    assert {each.moves_first for each in found} == {True, False}
    assert max(len(each.products) for each in found) == 3
    kinds = {(each.move.steps[0].forward, each.move.steps[0].backward) for each in found}
    assert {("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")} <= kinds


@pytest.mark.parametrize("microbatches", [8, 4])
def test_rows_of_the_sharded_dim(microbatches: int) -> None:
    """Where a microbatch's rows don't divide, the sequence is cut, of which each piece has some of every shard."""
    count = 16 // microbatches
    plan = plan_for("llama", 2, ("tensor=2", f"pieces={count}", f"microbatches={microbatches}"))
    found = in_pieces("llama", plan)
    assert {each.dim for each in found if each.sharded_dim == 1 and each.count == count} == {1}
    assert_parity(subject("llama"), plan)


def test_stages_run_in_pieces() -> None:
    constraints = ("pipeline=2", "schedule=zbv", "microbatches=4", "tensor=2", "pieces=2")
    plan = plan_for("llama", 4, constraints, stages=True)
    assert in_pieces("llama", plan)
    assert_parity(subject("llama"), plan)


def test_one_piece_is_none() -> None:
    plan = plan_for("llama", 2, ("tensor=2", "pieces=1"))
    assert not pieces_of(plan)
    with pytest.raises(ConstraintError, match="at least 1"):
        plan_for("llama", 2, ("pieces=0",))


def test_a_search_takes_pieces_where_they_are_faster() -> None:
    """The step is never slower for them, and the predictions of a free plan are those of its decisions."""
    program, training = subject("llama").traced.program, TrainingSpec()
    free = plan_for("llama", 2, ("tensor=2",))
    whole = plan_for("llama", 2, ("tensor=2", "pieces=1"))
    assert pieces_of(free)
    assert free.step_time_s < whole.step_time_s
    again = predict(program, free.decisions, quick_prices(2), training, None)
    assert again.step_time_s == pytest.approx(free.step_time_s, rel=1e-9)
    assert "collectives overlapped with products" in str(free)


def test_no_device_hides_what_takes_all_of_its_speed() -> None:
    """Where a collective stops compute, pieces gain nothing and none are chosen."""

    class Blocking(ClusterPrices):
        def interference(self, kind: str, axis: Axis) -> float:
            return 1.0

    base = quick_prices(2)
    prices = Blocking(base.cluster, base.profile)
    plan = search(subject("llama").traced.program, 2, prices, SearchRequest(constraints=("tensor=2",)))
    assert not pieces_of(plan)


class FlatPrices:
    """A product of r rows takes r, whatever else; a collective its bytes; copies nothing."""

    def __init__(self, byte_s: float, taken: float) -> None:
        self.byte_s, self.taken = byte_s, taken

    def op_s(self, op: Op, operands: tuple[TensorType, ...], results: object, differentiable: bool) -> OpTime:
        rows = 0.0 if operands[0].dtype == "uint8" else float(operands[0].num_elements / operands[0].shape[-1])
        return OpTime(rows, 2 * rows, "roofline") if rows else OpTime(0.0, 0.0, "roofline")

    def collective_s(self, kind: str, axis: object, num_bytes: float) -> float:
        return self.byte_s * num_bytes

    def interference(self, kind: str, axis: object) -> float:
        return self.taken


def test_what_is_hidden_is_all_but_the_first_piece() -> None:
    """By hand: three products of r rows take 3 r whole, a collective c."""
    plan = plan_for("llama", 2, ("tensor=2", "pieces=2"))
    program = subject("llama").traced.program
    placed = PlannedLayers(program, plan.decisions).placed[1]
    whole = local_program(replace(placed, pieces=()))
    each = next(e for e in pieced_collectives(whole).values() if len(e.products) == 3)
    cut = with_count(whole, each, 2)
    assert cut is not None
    rows = cut.products[0].state.operand_types[0].num_elements / cut.products[0].state.operand_types[0].shape[-1]
    num_bytes = each.move.tensor.num_bytes * each.move.steps[0].fraction
    for ratio in (0.1, 1.0, 10.0):  # of a collective's seconds to those of the products
        c, k = ratio * 3 * rows, 3 * rows
        prices: Any = FlatPrices(c / num_bytes, 0.0)
        blocking: Any = FlatPrices(c / num_bytes, 1.0)
        found = hidden_s(whole, cut, placed, prices, TrainingSpec())
        assert found["forward"] == pytest.approx(c + k - (c / 2 + max(c / 2 + k / 2, k)))
        assert found["backward"] == pytest.approx(c + 2 * k - max(k / 2 + c, k + c / 2, 2 * k))
        stopped = hidden_s(whole, cut, placed, blocking, TrainingSpec())
        assert stopped["forward"] == pytest.approx(0.0, abs=1e-9 * c)


def test_a_plan_file_keeps_pieces_and_bad_ones_are_refused(tmp_path: Path) -> None:
    program = subject("llama").traced.program
    plan = plan_for("llama", 2, ("tensor=2", "pieces=2"))
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path).decisions == plan.decisions
    index = next(number for number, each in enumerate(plan.strategies) if len(each.pieces) > 2)
    name = plan.strategies[index].pieces[0][0]
    bad: list[tuple[tuple[tuple[str, int], ...], str]] = [
        (((name, 7),), "can't be cut into 7"),
        (((name, 1),), "can't be cut into 1"),
        (((name, -2),), "can't be cut into -2"),
        ((("nothing", 2),), "can't run in pieces"),
    ]
    for pieces, match in bad:
        strategies = [*plan.strategies]
        strategies[index] = replace(strategies[index], pieces=pieces)
        with pytest.raises(PlanMismatchError, match=match):
            check_fit(plan.with_decisions(strategies=tuple(strategies)), program, 2)
    data = json.loads(path.read_text())
    data["decisions"]["strategies"][index]["pieces"] = {name: "2"}
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFormatError, match="whole numbers"):
        Plan.load(path)
    del data["decisions"]["strategies"][index]["pieces"]  # as in files of earlier versions
    path.write_text(json.dumps(data))
    assert not Plan.load(path).strategies[index].pieces


def check_processes(*constraints: str, compiled: bool = False) -> None:
    model, inputs = make("llama")
    parallel = parallelize(model, inputs, constraints=constraints, compile=compiled)
    assert pieces_of(parallel.plan)
    assert_same_step(parallel, model, inputs)


@pytest.mark.slow
def test_processes_run_in_pieces() -> None:
    launch(2, partial(check_processes, "tensor=2", "pieces=2"), partial(check_processes, "tensor=2", "pieces=4"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
def test_compiled_layers_run_in_pieces() -> None:
    launch(2, partial(check_processes, "tensor=2", "pieces=2", compiled=True))


@pytest.mark.slow
def test_half_precision_adds_up_as_promised() -> None:
    plan = plan_for("llama", 2, ("tensor=2", "pieces=2"), torch.float32)
    assert_parity(subject("llama", torch.float32), plan, torch.float32)
